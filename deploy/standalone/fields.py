# SPDX-License-Identifier: Apache-2.0
"""What a JSON object may hold, said as a table of fields; the one place where a body is checked.

Both services describe their nouns as `{name: Field(...)}` and call `check`. A wrong body raises a 400 that
names the field and what it allows, so that no handler ever meets a value of the wrong type.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import falcon

INT_MAX = 2**31 - 1
WORDS = {str: "a string", bool: "true or false", int: "an integer", dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Field:
    """One key of a body: its JSON type and its limits. `size` bounds a string's length or a list's, `least` a number.
    """

    kind: type
    required: bool = False
    null: bool = False
    size: int = 255
    empty: bool = True
    choices: tuple[str, ...] = ()
    pattern: str = ""
    least: int = 0

    def complaint(self, value: object) -> str | None:
        """What is wrong with `value`, as the end of a sentence; None when it may stand."""
        if value is None:
            return None if self.null else f"must be {WORDS[self.kind]}, not null"
        if type(value) is not self.kind:
            return f"must be {WORDS[self.kind]}"
        if isinstance(value, int) and not self.least <= value <= INT_MAX:
            return f"must be from {self.least} to {INT_MAX}"
        if isinstance(value, str | list) and len(value) > self.size:
            return f"must not be longer than {self.size}"
        if isinstance(value, str):
            return self._complaint_of_text(value)
        return None

    def _complaint_of_text(self, value: str) -> str | None:
        if not self.empty and not value.strip():
            return "must not be empty"
        if self.choices and value not in self.choices:
            return f"must be one of {', '.join(self.choices)}"
        if self.pattern and not re.fullmatch(self.pattern, value):
            return f"must match {self.pattern}"
        return None


def check(body: object, fields: Mapping[str, Field], where: str, *, partial: bool = False,
          others: bool = False) -> dict[str, Any]:
    """Return `body` if it is an object that `fields` allow; `where` is its name in the error.

    With `partial` required fields may be absent, with `others` unknown keys pass. Raises a 400 that names the
    field.
    """
    if not isinstance(body, dict):
        raise falcon.HTTPBadRequest(description=f"'{where}' must be an object.")
    for name, field in fields.items():
        if name not in body:
            if field.required and not partial:
                raise falcon.HTTPBadRequest(description=f"'{where}.{name}' is a required property.")
        elif complaint := field.complaint(body[name]):
            raise falcon.HTTPBadRequest(description=f"'{where}.{name}' {complaint}.")
    unknown = sorted(body.keys() - fields.keys())
    if unknown and not others:
        raise falcon.HTTPBadRequest(description=f"'{where}.{unknown[0][:64]}' is not a known property.")
    return body
