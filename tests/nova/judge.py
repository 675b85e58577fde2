# SPDX-License-Identifier: Apache-2.0
"""A program that validates values against Nova's schemas with Nova's own validator.

The Python of an environment with Nova runs this program. The input on stdin is
{"schemas": […], "cases": [[index of the schema, value], …]}. The output is a list with true for
each accepted value and false for each refused value.
"""

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any

# The real nova.api.validation and nova.objects.tag import a web service and a database, which takes
# seconds. The validators need neither, and this program does not use MAX_TAG_LENGTH. So empty
# modules replace both.
specification = importlib.util.find_spec("nova.api.validation")
sys.modules["nova.api.validation"] = importlib.util.module_from_spec(specification)
sys.modules["nova.objects.tag"] = SimpleNamespace(MAX_TAG_LENGTH=0)

from nova.api.validation import validators  # noqa: E402


def accepts(validator: Any, value: Any) -> bool:
    """Return True if the value is valid. An exception of the validator counts as a refusal."""
    try:
        return bool(validator.is_valid(value))
    # Nova answers 400 for a TypeError, and fails with a ValueError.
    except (TypeError, ValueError):
        return False


if __name__ == "__main__":
    request = json.load(sys.stdin)
    checks = [validators._SchemaValidator(schema).validator for schema in request["schemas"]]
    json.dump([accepts(checks[index], value) for index, value in request["cases"]], sys.stdout)
