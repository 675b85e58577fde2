# SPDX-License-Identifier: Apache-2.0
"""The host: its capabilities, its inventory, and whether KVM works."""
