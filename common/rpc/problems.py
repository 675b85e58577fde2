# SPDX-License-Identifier: Apache-2.0
"""Results and Problems as plain data, for the answers of one process to another."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject, JsonValue
from common.service.log import get_logger

log = get_logger(__name__)


def run_method(
    function: Callable[..., object], arguments: JsonMapping, *passes: type[Exception]
) -> JsonObject:
    """Call a function and return its result or Problem as plain data, which ``result`` reads.

    An unexpected exception is logged, and returned as a Problem without details.

    Args:
        function: The function.
        arguments: Arguments by name.
        passes: Exceptions that are raised to the caller.
    """
    try:
        return {"result": function(**arguments)}
    except passes:
        raise
    except errors.Problem as problem:
        return {"problem": type(problem).__name__, "text": problem.text}
    except Exception:
        log.exception(
            "a call of another process failed unexpectedly",
            method=getattr(function, "__qualname__", function),
        )
        return {"problem": "Problem", "text": errors.Problem().text}


def result(answer: JsonObject) -> JsonValue:
    """Return the result in an answer of ``run_method``, or raise the Problem in it.

    Raises:
        Problem: With the class and text of the original. Other attributes are lost.
    """
    if isinstance(answer, dict) and "problem" in answer:
        raise _rebuild(answer["problem"], answer["text"])
    return answer["result"]


def _rebuild(name: str, text: str) -> errors.Problem:
    """Return the Problem with this class and text.

    A class of a newer sender that is unknown here becomes a plain Problem.
    """
    candidate = getattr(errors, name, None)
    kind = (
        candidate
        if isinstance(candidate, type) and issubclass(candidate, errors.Problem)
        else errors.Problem
    )
    problem = kind.__new__(kind)
    # Some classes build their text from arguments, which the message does not contain.
    errors.Problem.__init__(problem, text)
    return problem
