# SPDX-License-Identifier: Apache-2.0
"""An action of a server that is checked and ready to begin.

``actions.action_table`` lists the functions that prepare actions from request bodies.
``actions.actions`` begins the prepared action.
"""

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

    #: Arguments of the workflow.
    args: JsonObject = field(default_factory=dict)
    #: Stored encrypted in the action's row.
    password: str | None = field(default=None, repr=False)
    #: New values of columns of the server.
    changes: JsonObject = field(default_factory=dict)
    #: Builds the response after the begin. None gives an empty response.
    answer: Callable[[], ApiResponse] | None = None
    begin: Begin = actions.begin
    #: The step that the response waits for. None means the step in the row of ``states.ACTIONS``,
    #: if any.
    answer_after: str | None = None
    #: The error if that step fails.
    failure: type[errors.Problem] = errors.Conflict
    #: Undoes changes in external services if the action cannot begin.
    give_up: Callable[[], None] | None = None
    #: Files for the config drive, stored encrypted like the password.
    files: list[dict[str, str]] = field(default_factory=list, repr=False)


#: Takes the request, the server's row, and the value of the action's key in the body.
Prepare = Callable[[Request, ServerRecord, Any], PreparedAction]


def refuse_changed(row: ServerRecord, checked: ServerRecord) -> None:
    """Check that the locked row has the flavor and the image that were checked without the lock.

    Args:
        row: The row of the server, read under the lock.
        checked: The row of the server, read before the lock.

    Raises:
        Conflict: Another request has changed the flavor or the image.
    """
    if (row.flavor, row.image) != (checked.flavor, checked.image):
        raise errors.Conflict(
            f"Another request changed the flavor or image of instance {checked.id} at the same time; "
            "try again."
        )
