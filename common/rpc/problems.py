# SPDX-License-Identifier: Apache-2.0
"""Results and Problems as plain data: a Problem that one process raised is raised by the one that
asked it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject, JsonValue

log = logging.getLogger(__name__)


def answered(
    function: Callable[..., object], arguments: JsonMapping, *passes: type[Exception]
) -> JsonObject:
    """What the function returned or raised; exceptions of the kinds in ``passes`` are the
    caller's."""
    try:
        return {"result": function(**arguments)}
    except passes:
        raise
    except errors.Problem as problem:
        return {"problem": type(problem).__name__, "text": problem.text}
    except Exception:
        log.exception("%s failed unexpectedly", getattr(function, "__qualname__", function))
        return {"problem": "Problem", "text": errors.Problem().text}


def result(answer: JsonObject) -> JsonValue:
    """What ``answered`` was given, or raises the Problem: its class and text are the same, other
    attributes are not."""
    if isinstance(answer, dict) and "problem" in answer:
        raise _rebuilt(answer["problem"], answer["text"])
    return answer["result"]


def _rebuilt(name: str, text: str) -> errors.Problem:
    """One of a newer sender that is unknown here is a plain Problem."""
    found = getattr(errors, name, None)
    kind = (
        found if isinstance(found, type) and issubclass(found, errors.Problem) else errors.Problem
    )
    problem = kind.__new__(kind)
    # some kinds make their text from parts, which did not travel
    errors.Problem.__init__(problem, text)
    return problem
