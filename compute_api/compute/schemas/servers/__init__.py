# SPDX-License-Identifier: Apache-2.0
"""Schemas of servers and of their parts."""
