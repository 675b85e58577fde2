# SPDX-License-Identifier: Apache-2.0
"""Consoles of the Compute API, and what a host calls them. For the API, which hands out their URLs,
and the console service, which opens them."""

from __future__ import annotations

#: Type in the API -> the kind that a host is asked for. There are no others.
HOST_KINDS = {"novnc": "vnc", "serial": "serial"}
