# SPDX-License-Identifier: Apache-2.0
"""The types of JSON: bodies of requests and responses, records of other services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Any value; its schema or its service defines which.
JsonValue = Any
#: An object; its schema or its service defines the keys.
JsonObject = dict[str, Any]
#: The same, for who only reads it.
JsonMapping = Mapping[str, Any]
