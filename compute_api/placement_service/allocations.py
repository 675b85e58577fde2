# SPDX-License-Identifier: Apache-2.0
"""/allocations: who holds what. Read only: the claim of Kilonova's conductor is the one door in."""
from __future__ import annotations

from typing import Any

from common import errors
from common.store import consumers, providers
from common.store.engine import Connection, Row
from compute_api.placement_service.request import Answer, Body, Request

OWNERS, CONSUMER_GENERATION, CONSUMER_TYPE = 12, 28, 38
#: Types of consumers, as the API's users know them.
TYPES = {"server": "INSTANCE", "migration": "MIGRATION"}


def show(request: Request, consumer_uuid: str) -> Answer:
    """What a consumer holds; one statement. Nothing, for one that is not known."""
    rows = request.read(consumers.of_consumer, consumer_uuid)
    held: dict[str, Body] = {}
    for row in rows:
        held.setdefault(row.uuid, {"generation": row.generation, "resources": {}})["resources"][
            row.resource_class] = row.used
    body: Body = {"allocations": held}
    if rows and request.version >= OWNERS:
        body |= {"project_id": rows[0].project_id, "user_id": rows[0].user_id}
    if rows and request.version >= CONSUMER_GENERATION:
        body["consumer_generation"] = rows[0].consumer_generation
    if rows and request.version >= CONSUMER_TYPE:
        body["consumer_type"] = type_of(rows[0].type)
    return Answer(body, modified=rows[0].created_at if rows else None)


def of_provider(request: Request, provider_uuid: str) -> Answer:
    """What is held of a provider; two statements."""
    def work(tx: Connection) -> tuple[Row[Any], list[Row[Any]]]:
        provider = providers.show(tx, provider_uuid)
        return provider, consumers.of_provider(tx, provider.id)
    provider, rows = request.read(work)
    held: dict[str, Body] = {}
    for row in rows:
        entry = held.setdefault(row.consumer_id, {"resources": {}})
        entry["resources"][row.resource_class] = row.used
        if request.version >= CONSUMER_GENERATION:
            entry["consumer_generation"] = row.consumer_generation
    return Answer({"allocations": held, "resource_provider_generation": provider.generation},
                  modified=provider.changed_at)


def type_of(kind: str) -> str:
    """A type of consumers, as the API's users know it."""
    return TYPES.get(kind, kind)


def refuse(request: Request, **params: str) -> None:
    """Every way to write."""
    raise errors.Forbidden("Allocations are written by Kilonova's own claim alone, when servers are placed and moved; "
                           "they cannot be changed from outside. Change the server instead.")
