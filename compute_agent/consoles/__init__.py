# SPDX-License-Identifier: Apache-2.0
"""Consoles of guests: sessions of the console service, and direct ports for proxies."""
