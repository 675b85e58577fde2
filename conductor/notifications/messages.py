# SPDX-License-Identifier: Apache-2.0
"""The messages that a row of the outbox is sent as: one of each format that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from common.domain.json_types import JsonMapping, JsonObject
from common.notifications.message import Message
from common.service.notification_options import BOTH, UNVERSIONED, VERSIONED
from conductor.notifications import compute_task, instance, legacy, nouns


def _instance(event: str, body: JsonMapping) -> JsonObject:
    return instance.payload(event, body["object"], body["request"], body["about"])


def _older_instance(event: str, body: JsonMapping) -> tuple[str, JsonObject] | None:
    name = legacy.name(event)
    return None if name is None else (name, legacy.server(event, body["object"], body["about"]))


def _task(event: str, body: JsonMapping) -> JsonObject:
    return compute_task.payload(body["object"], body["about"])


def _older_task(event: str, body: JsonMapping) -> tuple[str, JsonObject]:
    return compute_task.older(event, body["object"], body["about"])


def _noun(event: str, body: JsonMapping) -> JsonObject:
    return nouns.payload(event, body["object"])


def _older_noun(event: str, body: JsonMapping) -> tuple[str, JsonObject] | None:
    return nouns.older(event, body["object"])


#: The first word of an event -> how its payload is made, and how its older name and payload are;
#: others: ``nouns``.
PAYLOADS: dict[
    str,
    tuple[
        Callable[[str, JsonMapping], JsonObject],
        Callable[[str, JsonMapping], tuple[str, JsonObject] | None],
    ],
] = {"instance": (_instance, _older_instance), "compute_task": (_task, _older_task)}


class OutboxMessage(Protocol):
    """A row of the outbox."""

    id: int
    event: str
    publisher: str
    body: JsonObject


def messages(row: OutboxMessage, form: str) -> list[Message]:
    """Of a row of the outbox. The context's ``notification_id`` is the same when a message is sent
    again."""
    newer, older = PAYLOADS.get(row.event.split(".")[0], (_noun, _older_noun))
    request, is_error = row.body["request"], row.event.endswith(".error")
    context = {
        "request_id": request.get("id"),
        "user_id": request.get("user"),
        "project_id": request.get("project"),
        "notification_id": row.id,
    }
    found = []
    if form in (VERSIONED, BOTH):
        found.append(
            Message(True, row.publisher, row.event, newer(row.event, row.body), is_error, context)
        )
    if form in (UNVERSIONED, BOTH) and (named := older(row.event, row.body)):
        source, _, host = row.publisher.partition(":")
        found.append(
            Message(False, f"{source.removeprefix('nova-')}.{host}", *named, is_error, context)
        )
    return found
