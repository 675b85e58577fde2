# SPDX-License-Identifier: Apache-2.0
"""Random requests for the operations of the services.

Request number n of a seed is always the same, except for the ids of records, which differ between
worlds.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes, urlencode

from tests.fuzz import hostile
from tests.nova import samples
from tests.surface.bodies import QUERIES
from tests.surface.operations import PARAMETER, Operation
from tests.surface.site import Site
from tests.surface.world import World

PERSONAS, WEIGHTS = (
    ("member", "admin", "manager", "reader", "other", "service", "none"),
    (45, 25, 5, 5, 10, 5, 5),
)
#: Weights for services with operations mostly for admins.
OF_ADMINS = (10, 70, 2, 3, 5, 5, 5)
SERVICES = {
    "compute": 40,
    "network": 25,
    "identity": 15,
    "image": 10,
    "placement": 10,
    "metadata": 6,
    "image-gateway": 4,
}
#: Query parameters of lists.
PARAMETERS = (
    "limit",
    "marker",
    "name",
    "sort_key",
    "sort_dir",
    "changes-since",
    "all_tenants",
    "project_id",
    "fields",
    "page_reverse",
    "id",
    "status",
    "tags",
    "ip",
    "host",
    "created_at",
    "visibility",
    "resources",
    "required",
    "member_of",
    "in_tree",
    "uuid",
    "offset",
    "user_id",
    "start",
    "end",
    "detailed",
    "with_servers",
    "seen",
)


@dataclass(frozen=True)
class Request:
    """A request. ``target`` is the path and query of the request line."""

    operation: Operation
    persona: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def text(self) -> bytes:
        """The target, raw and decoded, the header values and the body."""
        words = " ".join([self.target, unquote(self.target), *(value for _, value in self.headers)])
        return words.encode("utf-8", "replace") + self.body

    def __str__(self) -> str:
        header_lines = "".join(f"\n  {name}: {value[:200]!r}" for name, value in self.headers)
        body = f"\n  {self.body[:1000]!r}" + f" … {len(self.body)} bytes" * (len(self.body) > 1000)
        return f"{self.operation.service}: {self.method} {self.target[:1000]} as {self.persona}{header_lines}{body}"


@dataclass(frozen=True)
class Answer:
    """An answer. ``seconds`` is the CPU time of the application."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


def make(world: World, seed: int, number: int) -> Request:
    """Return request ``number`` of this seed."""
    chance = Random(f"{seed}:{number}")
    service = chance.choices(list(SERVICES), list(SERVICES.values()))[0]
    operation = chance.choice(
        [
            operation_or_pair
            for operation_or_pair in (*world.operations, *world.signed)
            if operation_or_pair.service == service
        ]
    )
    site = world.sites[service]
    records = sorted(
        {
            operation_or_pair
            for owner in ("own", "foreign")
            for operation_or_pair in site.ids[owner].items()
        }
    )
    ids = [value for _, value in records]
    persona = chance.choices(
        PERSONAS, OF_ADMINS if service in ("identity", "placement") else WEIGHTS
    )[0]
    method = operation.method if chance.random() < 0.97 else chance.choice(hostile.METHODS)
    target = _path(operation, site, chance) + _query(operation, chance, ids)
    body = _body(operation, site, chance, ids)
    return Request(
        operation, persona, method, target, _headers(operation, site, persona, chance, body), body
    )


def _path(operation: Operation, site: Site, chance: Random) -> str:
    kinds = iter(operation.kinds)

    def replace_parameter(_: Any) -> str:
        kind, draw = next(kinds), chance.random()
        if draw < 0.75:
            return quote(site.id_of("own", kind), safe="")
        if draw < 0.9:
            return quote(site.id_of("foreign" if draw < 0.85 else "missing", kind), safe="")
        return chance.choice(
            (
                "%ff",
                "%c3%28",
                quote(
                    chance.choice(hostile.TEXTS)[:2000].encode("utf-8", "replace"),
                    safe="/" if draw < 0.93 else "",
                ),
            )
        )

    path = PARAMETER.sub(replace_parameter, operation.path)
    if operation.service == "compute":
        project = site.ids["own"]["os-quota-sets"]
        roots = ("/v2.1", "/v2", f"/v2.1/{project}", "/v2.1/versions")
        path = chance.choices(roots, (88, 7, 3, 2))[0] + path
    return path + ("/" if chance.random() < 0.01 else "")


def _query(operation: Operation, chance: Random, ids: list[str]) -> str:
    if chance.random() < 0.5 and operation.method == "GET":
        parameters = list((operation.query or {}).get("properties", {})) or list(PARAMETERS)
        names = [
            chance.choice(parameters if chance.random() < 0.8 else PARAMETERS + hostile.KEYS)
            for _ in range(chance.choice((1, 1, 2, 3)))
        ]
        pairs = [(name, str(hostile.value(chance, ids))[:2000]) for name in names]
        if chance.random() < 0.02:
            pairs *= 150
        return "?" + (
            urlencode(pairs, errors="replace") if chance.random() < 0.97 else "%ff=%fe&&=&a=%"
        )
    return QUERIES.get(operation.title, "")


def _body(operation: Operation, site: Site, chance: Random, ids: list[str]) -> bytes:
    if operation.method in ("GET", "HEAD", "DELETE") and chance.random() < 0.95:
        return b""
    if chance.random() < 0.08:
        return chance.choice(hostile.RAW)
    body = operation.body(site, chance.choices(("own", "foreign"), (85, 15))[0])
    if isinstance(body, bytes):
        return body
    if operation.schema is not None and chance.random() < 0.6:
        body = fuller(operation.schema, chance)
    for _ in range(chance.choices((0, 1, 2, 3), (10, 60, 20, 10))[0]):
        body = hostile.mutate(body, chance, ids, operation.fields)
    return hostile.encode(body)


def fuller(schema: dict[str, Any], chance: Random) -> Any:
    """Return a value that fits a schema, or nearly fits, with random optional properties."""
    schema = chance.choice(samples.choices(schema))
    if "properties" not in schema or "object" not in samples.types(schema):
        try:
            return samples.simplest(schema)
        # A format that only the placement service has.
        except KeyError:
            return "x"
    names = [
        name
        for name in schema["properties"]
        if name in schema.get("required", ()) or chance.random() < 0.4
    ]
    return {name: fuller(schema["properties"][name], chance) for name in names}


def _headers(
    operation: Operation, site: Site, persona: str, chance: Random, body: bytes
) -> tuple[tuple[str, str], ...]:
    result = {"Host": "localhost", **site.proof(persona, chance)}
    if body:
        result["Content-Type"] = "application/json"
    result |= operation.headers(site)
    if operation.service == "compute" and chance.random() < 0.4:
        result["OpenStack-API-Version"] = f"compute 2.{chance.randint(1, 103)}"
    if operation.service == "placement" and chance.random() < 0.4:
        result["OpenStack-API-Version"] = f"placement 1.{chance.randint(0, 39)}"
    for _ in range(chance.choices((0, 1, 2, 4), (75, 15, 7, 3))[0]):
        name, values = chance.choice(hostile.HEADERS)
        result[name] = chance.choice(values)
    return tuple(result.items())


def send(site: Site, request: Request) -> Answer:
    """Call the application with a WSGI environment as gunicorn would.

    Exceptions of the application propagate.
    """
    path, _, query = request.target.partition("?")
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "RAW_URI": request.target,
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "REMOTE_PORT": "1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "wsgi.input_terminated": True,
    }
    if request.body:
        environ["CONTENT_LENGTH"] = str(len(request.body))
    for name, value in request.headers:
        key = name.upper().replace("-", "_")
        environ[key if key == "CONTENT_TYPE" else f"HTTP_{key}"] = value
    started: list[Any] = []
    start = time.thread_time()
    items: Sequence[bytes] = site.application(
        environ, lambda status, headers, *more: started.extend((status, headers))
    )
    body = b"".join(items)
    if hasattr(items, "close"):
        items.close()
    status, headers = started[-2:]
    return Answer(
        int(status.split()[0]),
        {name.lower(): value for name, value in headers},
        body,
        time.thread_time() - start,
    )
