# SPDX-License-Identifier: Apache-2.0
"""Bodies of POST /servers/{id}/action, by their key."""
from __future__ import annotations

from compute_api.schemas.common import ANY, integer, record, wrapped
from compute_api.validation import Document, Versioned

_LENGTH: Document = {"anyOf": [integer(-1), {"type": "null"}]}

#: Any body: which key it has is judged first.
BODY = Versioned({"type": "object"})

BY_KEY: dict[str, Versioned] = {
    "os-start": Versioned(wrapped("os-start", ANY)),
    "os-stop": Versioned(wrapped("os-stop", ANY)),
    "reboot": Versioned(wrapped("reboot", record(
        {"type": {"enum": ["HARD", "Hard", "hard", "SOFT", "Soft", "soft"]}}, ("type",)))),
    "os-getConsoleOutput": Versioned(wrapped("os-getConsoleOutput", record({"length": _LENGTH}))),
}
