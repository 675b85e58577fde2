# SPDX-License-Identifier: Apache-2.0
"""Placement: providers with their inventories and traits, who holds how much (allocations), what
schedulers read."""
