# SPDX-License-Identifier: Apache-2.0
"""Interfaces, addresses and security groups of servers."""
