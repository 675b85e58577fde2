# SPDX-License-Identifier: Apache-2.0
"""Tier 1 of the fault matrix: cells with real processes, a real broker and real databases.

The module ``orders`` is used on both sides. ``victim``, ``seams``, ``struck``, ``at_agents`` and
``at_conductors`` run in the processes with faults, and the other modules in the test process. See
docs/decisions/0022.
"""
