# SPDX-License-Identifier: Apache-2.0
"""Processes with rights that the agent lacks, and their clients in the agent."""
