# SPDX-License-Identifier: Apache-2.0
"""Servers: their rows, what is done to them (actions), where their guests are, and how they move
(migrations)."""
