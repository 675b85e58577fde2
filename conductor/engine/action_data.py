# SPDX-License-Identifier: Apache-2.0
"""The data that steps leave for later steps, and the failure of a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import FailureReason
from common.domain.wire import to_wire
from common.store.engine import Connection, moment


@dataclass(kw_only=True)
class Failure:
    """The failure of an action, in its journal."""

    #: Description of the failure, safe for the tenant.
    text: str
    #: More about the cause, for the operator.
    details: str = ""
    #: Whether another host may succeed.
    retryable: bool = False
    #: The HTTP status of an external service's refusal.
    status: int | None = None
    #: The reason by which workflows decide.
    reason: FailureReason = FailureReason.UNSPECIFIED


class StepFailed(Exception):
    """A definite failure of a step, with the fields of ``Failure``. ``str()`` is its text."""

    def __init__(
        self,
        text: str,
        details: str = "",
        retryable: bool = False,
        status: int | None = None,
        reason: FailureReason = FailureReason.UNSPECIFIED,
    ) -> None:
        super().__init__(text)
        self.details = details
        self.retryable = retryable
        self.status = status
        self.reason = reason


@dataclass(kw_only=True)
class ActionData:
    """Data of an action's journal that a step leaves for later steps.

    A workflow declares the data of its own steps in a subclass. Lists and dictionaries are
    replaced, never changed in place. None, and a field's default, are not written.
    """

    #: The action that this action has superseded.
    after: str | None = None
    #: Why an operator ends the action.
    abort: str | None = None
    #: The first failure.
    problem: Failure | None = None
    #: For each step that could not be undone, the reason.
    undo_failures: dict[str, str] = field(default_factory=dict)
    #: The reasons of the pending cleanups at external services.
    left_undone: str | None = None
    #: How many times waiting steps have polled.
    polls: int = 0

    def add_undo_failure(self, step: str, why: str) -> None:
        """Record that the undo of a step has definitely failed, with the reason."""
        self.undo_failures = {**self.undo_failures, step: why}

    def clear_undo_failures(self) -> None:
        """Remove the recorded undo failures, because another step has corrected their effects."""
        self.undo_failures = {}


def journal(data: ActionData, stored: JsonMapping) -> JsonObject:
    """Return the data in the form that the row of the action stores.

    Fields with their default value are left out. Fields of ``stored`` that this release does not
    know are kept.
    """
    plain, default = to_wire(data), _default(cast(Hashable, type(data)))
    unknown_fields = {name: value for name, value in stored.items() if name not in default}
    return unknown_fields | {name: value for name, value in plain.items() if value != default[name]}


@cache
def _default(kind: Any) -> JsonObject:
    return dict(to_wire(kind()))


def fault_of(tx: Connection, problem: StepFailed) -> JsonObject:
    """Return the fault of a server in ERROR: code 500, the failure's texts, the database's time."""
    return {"code": 500, "message": str(problem), "details": problem.details, "created": moment(tx)}
