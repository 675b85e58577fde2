# SPDX-License-Identifier: Apache-2.0
"""Runs workflows: takes due actions, runs their steps, records the results. Imports no workflow."""
