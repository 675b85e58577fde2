# SPDX-License-Identifier: Apache-2.0
"""Types of JSON values: bodies of requests and responses, records of other services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Any value. A schema or another service defines the form.
JsonValue = Any
#: An object. A schema or another service defines the keys.
JsonObject = dict[str, Any]
#: An object that the function only reads.
JsonMapping = Mapping[str, Any]
