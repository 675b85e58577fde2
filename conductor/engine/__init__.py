# SPDX-License-Identifier: Apache-2.0
"""Execute workflows: take due actions, run their steps, record the results. Imports no workflow."""
