# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: everything that can go wrong, at every step of every workflow; see
docs/reliability.md.

``./deploy/test faults`` runs all of it; what tests/workflows/test_fault_matrix.py runs is the tenth
that the commit draws.
"""
