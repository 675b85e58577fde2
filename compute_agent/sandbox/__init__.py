# SPDX-License-Identifier: Apache-2.0
"""Processes that read what tenants wrote, and may do nothing else: ``client`` asks for them,
``server`` forks them, ``lockdown`` takes from them what they do not need (docs/decisions/0037)."""
