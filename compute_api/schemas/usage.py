# SPDX-License-Identifier: Apache-2.0
"""The queries of what projects have used."""
from __future__ import annotations

from compute_api.schemas.common import COUNT, query, repeated
from compute_api.validation import Versioned, put, strict

_PAGING = (put("limit", repeated(COUNT)), put("marker", repeated()))
LIST = Versioned(query({"start": repeated(), "end": repeated(), "detailed": repeated()}), ("2.40", *_PAGING),
                 ("2.75", strict))
SHOW = Versioned(query({"start": repeated(), "end": repeated()}), ("2.40", *_PAGING), ("2.75", strict))
