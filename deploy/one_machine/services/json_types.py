# SPDX-License-Identifier: Apache-2.0
"""The types of JSON: bodies of requests and responses, descriptions of hosts."""

from typing import Any

#: Any value; its schema defines which.
JsonValue = Any
#: An object; its schema defines the keys.
Body = dict[str, Any]
