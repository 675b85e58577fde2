# SPDX-License-Identifier: Apache-2.0
"""Consoles of guests: the sessions that the console service opens, and direct ports."""
