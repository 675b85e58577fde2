# SPDX-License-Identifier: Apache-2.0
"""Which values Nova's own validator takes, by its schemas: run with the Python of an environment
that has Nova.

Reads {"schemas": […], "cases": [[number of the schema, value], …]} from stdin and writes a list of
true and false.
"""

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any

# The validators need no web service and no database, whose imports take seconds: the package's own
# module does not run, and the one constant that they read of a database model is never used here.
specification = importlib.util.find_spec("nova.api.validation")
sys.modules["nova.api.validation"] = importlib.util.module_from_spec(specification)
sys.modules["nova.objects.tag"] = SimpleNamespace(MAX_TAG_LENGTH=0)

from nova.api.validation import validators  # noqa: E402


def takes(validator: Any, value: Any) -> bool:
    try:
        return bool(validator.is_valid(value))
    except (TypeError, ValueError):  # the first Nova answers 400, at the second it breaks
        return False


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    made = [validators._SchemaValidator(schema).validator for schema in asked["schemas"]]
    json.dump([takes(made[number], value) for number, value in asked["cases"]], sys.stdout)
