# SPDX-License-Identifier: Apache-2.0
"""Build the messages of a row of the outbox, one for each configured format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.domain.json_types import JsonMapping, JsonObject
from common.notifications.message import Message
from common.service.notification_options import BOTH, UNVERSIONED, VERSIONED
from conductor.notifications import compute_task, instance, legacy, nouns


def _instance_payload(event: str, body: JsonMapping) -> JsonObject:
    return instance.payload(event, body["object"], body["request"], body["about"])


def _legacy_instance(event: str, body: JsonMapping) -> tuple[str, JsonObject] | None:
    name = legacy.name(event)
    return None if name is None else (name, legacy.server(event, body["object"], body["about"]))


def _task_payload(event: str, body: JsonMapping) -> JsonObject:
    return compute_task.payload(body["object"], body["about"])


def _legacy_task(event: str, body: JsonMapping) -> tuple[str, JsonObject]:
    return compute_task.older(event, body["object"], body["about"])


def _noun_payload(event: str, body: JsonMapping) -> JsonObject:
    return nouns.payload(event, body["object"])


def _legacy_noun(event: str, body: JsonMapping) -> tuple[str, JsonObject] | None:
    return nouns.older(event, body["object"])


#: First word of an event -> functions for the versioned payload, and for the legacy name and
#: payload. Other events are in ``nouns``.
PAYLOADS: dict[
    str,
    tuple[
        Callable[[str, JsonMapping], JsonObject],
        Callable[[str, JsonMapping], tuple[str, JsonObject] | None],
    ],
] = {
    "instance": (_instance_payload, _legacy_instance),
    "compute_task": (_task_payload, _legacy_task),
}


class OutboxMessage(Protocol):
    """The columns of an outbox row that its messages need."""

    id: int
    event: str
    publisher: str
    body: JsonObject


def messages(row: OutboxMessage, form: str) -> list[Message]:
    """Return the messages of a row of the outbox: versioned, unversioned or both.

    The ``notification_id`` in the context is the id of the row, so a message that is sent twice has
    the same id.

    Args:
        row: The row.
        form: The option ``notification_format``.

    Returns:
        The messages. Empty if only unversioned messages are configured and the event has none.
    """
    newer, older = PAYLOADS.get(row.event.split(".")[0], (_noun_payload, _legacy_noun))
    request, is_error = row.body["request"], row.event.endswith(".error")
    context = {
        "request_id": request.get("id"),
        "user_id": request.get("user"),
        "project_id": request.get("project"),
        "notification_id": row.id,
    }
    results = []
    if form in (VERSIONED, BOTH):
        results.append(
            Message(True, row.publisher, row.event, newer(row.event, row.body), is_error, context)
        )
    if form in (UNVERSIONED, BOTH) and (legacy_parts := older(row.event, row.body)):
        source, _, host = row.publisher.partition(":")
        results.append(
            Message(
                False, f"{source.removeprefix('nova-')}.{host}", *legacy_parts, is_error, context
            )
        )
    return results
