# SPDX-License-Identifier: Apache-2.0
"""Disks, volumes and shares of servers."""
