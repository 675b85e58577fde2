# SPDX-License-Identifier: Apache-2.0
"""The host: capabilities, inventory, and whether KVM works."""
