# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: every fault at every step of every workflow, see docs/reliability.md.

``./deploy/test faults`` runs all cells. tests/workflows/test_fault_matrix.py runs those of the
default set.
"""
