# SPDX-License-Identifier: Apache-2.0
"""Which values Nova's own validator takes, by its schemas: run with the Python of an environment
that has Nova.

Reads {"schemas": […], "cases": [[number of the schema, value], …]} from stdin and writes a list of
true and false.
"""

import json
import sys
from typing import Any

from nova.api.validation import validators


def takes(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except (TypeError, ValueError):  # the first Nova answers 400, at the second it breaks
        return False


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    made = [validators._SchemaValidator(schema).validator for schema in asked["schemas"]]
    json.dump([takes(made[number], value) for number, value in asked["cases"]], sys.stdout)
