# SPDX-License-Identifier: Apache-2.0
"""Servers: list, show, update, delete, and their parts."""
