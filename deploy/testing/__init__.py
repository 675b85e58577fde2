# SPDX-License-Identifier: Apache-2.0
"""The parts of ./deploy/test.

``plan`` has the table of jobs and sets, and ``jobs`` runs jobs in parallel.
"""
