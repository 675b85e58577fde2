# SPDX-License-Identifier: Apache-2.0
"""Processes with rights that the agent lacks (kilonova-bridges, kilonova-volumes), and their
clients."""
