# SPDX-License-Identifier: Apache-2.0
"""Processes that read tenants' data and have no other rights (docs/decisions/0037).

``client`` requests them, ``server`` forks them, and ``lockdown`` removes their rights.
"""
