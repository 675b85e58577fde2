# SPDX-License-Identifier: Apache-2.0
"""Data of tenants: flavors, key pairs, quotas, server groups and usage."""
