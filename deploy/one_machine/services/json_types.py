# SPDX-License-Identifier: Apache-2.0
"""The types of JSON, for bodies of requests and responses and for descriptions of hosts."""

from typing import Any

#: Any value. The schema defines the possible values.
JsonValue = Any
#: An object. The schema defines the keys.
Body = dict[str, Any]
