# SPDX-License-Identifier: Apache-2.0
"""What tenants have and may have: flavors, keypairs, quotas, usage."""
