# SPDX-License-Identifier: Apache-2.0
"""Consoles of the Compute API, and what a host calls them. For the API, which hands out their URLs,
and the console service, which opens them."""

from __future__ import annotations

#: Type in the API -> the kind that a host is asked for. There are no others.
HOST_KINDS = {
    "novnc": "vnc",
    "serial": "serial",
    "spice-html5": "spice",
    "spice-direct": "spice-direct",
}
#: The type that an operator's own proxy opens, and not our console service.
SPICE_DIRECT = "spice-direct"
#: Types whose session is several connections of one browser.
OF_SEVERAL_CONNECTIONS = ("spice-html5",)
#: Path of the page of SPICE at the console service; the folder is spice-html5's.
SPICE_PAGE = "spice/spice_auto.html"
