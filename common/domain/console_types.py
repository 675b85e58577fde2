# SPDX-License-Identifier: Apache-2.0
"""The console types of the Compute API, and the host's name of each.

The API returns the URLs of consoles, and the console service opens them.
"""

from __future__ import annotations

#: Type in the API -> kind of console in requests to the host. Other types are not supported.
HOST_KINDS = {
    "novnc": "vnc",
    "serial": "serial",
    "spice-html5": "spice",
    "spice-direct": "spice-direct",
}
#: The type that the operator's own proxy opens instead of the console service.
SPICE_DIRECT = "spice-direct"
#: Types with several connections of one browser in a session.
OF_SEVERAL_CONNECTIONS = ("spice-html5",)
#: Path of the page for SPICE at the console service. The folder is that of spice-html5.
SPICE_PAGE = "spice/spice_auto.html"
