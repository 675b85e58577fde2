# SPDX-License-Identifier: Apache-2.0
"""Tier 1 of the fault matrix: the same cells with real processes, a real broker and real databases;
see docs/decisions/0022.

``orders`` is what both sides share. ``victim`` and ``seams`` are in the processes that are struck;
the other modules are in the one that strikes.
"""
