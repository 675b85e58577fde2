# SPDX-License-Identifier: Apache-2.0
"""The types of JSON, for bodies of requests and responses and for descriptions of hosts."""

from typing import Any

#: Any value. Its schema defines the possible ones.
JsonValue = Any
#: An object. Its schema defines the keys.
Body = dict[str, Any]
