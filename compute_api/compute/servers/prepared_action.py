# SPDX-License-Identifier: Apache-2.0
"""An action of a server that is checked and ready to begin.

A function for each action prepares it from its body (``server_action_table``), ``server_actions``
begins it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.domain import errors
from common.domain.json_types import JsonObject
from common.store.rows import ServerRecord
from common.store.servers import actions
from compute_api.compute.request.request import Request
from compute_api.http.response import ApiResponse

#: Begins an action in the store, with the arguments of ``actions.begin``.
Begin = Callable[..., str]


@dataclass(frozen=True)
class PreparedAction:
    """An action that is ready to begin."""

    #: for the workflow
    args: JsonObject = field(default_factory=dict)
    #: stored encrypted in the action's row
    password: str | None = field(default=None, repr=False)
    #: columns of the server
    changes: JsonObject = field(default_factory=dict)
    #: makes the answer after the begin; None: an empty answer
    answer: Callable[[], ApiResponse] | None = None
    begin: Begin = actions.begin
    #: the step that the answer waits for; None: the step in the action's row, if any
    answer_after: str | None = None
    #: the error if that step fails
    failure: type[errors.Problem] = errors.Conflict
    #: undoes changes in external services if the action cannot begin
    give_up: Callable[[], None] | None = None
    #: stored encrypted as the password
    files: list[dict[str, str]] = field(default_factory=list, repr=False)


#: Takes the request, the server's row, and the value of the action's key in the body.
Prepare = Callable[[Request, ServerRecord, Any], PreparedAction]


def refuse_changed(row: ServerRecord, checked: ServerRecord) -> None:
    """Check that the locked row has the flavor and the image that were checked without the lock.

    Raises:
        Conflict: Another request has changed one of them.
    """
    if (row.flavor, row.image) != (checked.flavor, checked.image):
        raise errors.Conflict(
            f"Instance {checked.id} got another flavor or image while the request was checked; try "
            "again."
        )
