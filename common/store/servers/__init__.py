# SPDX-License-Identifier: Apache-2.0
"""Servers: their rows, actions, guests, volumes and migrations."""
