# SPDX-License-Identifier: Apache-2.0
"""Placement: providers, inventories, traits and allocations, and the queries of schedulers."""
