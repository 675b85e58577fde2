# SPDX-License-Identifier: Apache-2.0
"""Every operation of every service is refused without proof, for each spelling of its path.

A proof is a token, ticket or signature. tests/functional/test_console_service.py has the console,
which has no operations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import falcon
import pytest
from falcon.testing import Result, TestClient

from compute_api.compute import faults
from compute_api.compute.app import ComputeEndpoint
from compute_api.compute.middleware import ComputeHttpRequest, Dependencies
from compute_api.compute.policies import COMPUTE_RULES
from compute_api.compute.request import microversions
from compute_api.compute.routes import ROUTES
from compute_api.http.faults import answered_with
from compute_api.http.policy import Policy
from compute_api.http.routing import by_path
from deploy.one_machine.services.volume import app as volume_app
from tests.surface.disguises import disguises
from tests.surface.operations import Operation, standalone
from tests.surface.site import MISSING, Site
from tests.surface.world import World

#: Service, method and path, with the reason for access without proof.
PUBLIC = {
    "placement GET /": "the version document",
    "identity GET /": "the version document",
    "identity GET /v3": "the version document",
    "identity POST /v3/auth/tokens": "the proof is in the body",
    "image GET /": "the version document",
    "image GET /v2": "the version document",
    "image GET /versions": "the version document",
    "network GET /": "the version document",
    "volume GET /": "the version document",
    "volume GET /v3": "the version document",
}


def send_without_proof(
    client: TestClient, operation: Operation, path: str, site: Site | None
) -> Result:
    """Send the operation's complete request, but without proof."""
    path, _, query = path.partition("?")
    headers, body = {"Content-Type": "application/json"}, None
    if site is not None:
        headers |= operation.headers(site)
        body = operation.body(site)
    return client.simulate_request(
        operation.method,
        path,
        query_string=query,
        headers=headers,
        body=body if body is None or isinstance(body, bytes) else json.dumps(body),
    )


def iterate_answers(world: World, is_whole: bool) -> Iterator[tuple[Operation, str, Result]]:
    """Send every operation by its path and in disguises of the path, and yield the answers.

    Args:
        world: The services.
        is_whole: True for every disguise of every path. False disguises only the first operation of
            each service, method and length of path, because the check of the proof does not depend
            on more of the path.
    """
    shapes = set()

    def spellings(operation: Operation, path: str) -> Iterator[str]:
        shape = operation.service, operation.method, operation.path.count("/")
        every = dict.fromkeys(disguises(path))
        yield from every if is_whole or shape not in shapes else (path,)
        shapes.add(shape)

    # Versions and actions of one path share an endpoint.
    paths = {
        (each.service, each.method, each.path): each for each in world.operations + world.signed
    }
    for operation in paths.values():
        site = world.sites[operation.service]
        for path in spellings(operation, operation.url(site, "own")):
            yield operation, path, send_without_proof(site.client, operation, path, site)
    # A request that passes the check of the proof gives a 500.
    client = TestClient(volume_app.build(None))
    for operation in standalone("volume", client.app):
        for path in spellings(operation, re.sub(r"{\w+}", MISSING, operation.path)):
            yield operation, path, send_without_proof(client, operation, path, None)


def is_public(operation: Operation, path: str) -> bool:
    """Check whether PUBLIC has the path that the answer is for."""
    plain = re.sub("/+", "/", unquote(path)).rstrip("/") or "/"
    return f"{operation.service} {operation.method} {plain}" in PUBLIC


@pytest.mark.parametrize(
    ("is_whole", "minimum"),
    [(False, 2_000), pytest.param(True, 8_000, marks=pytest.mark.slice("operations"))],
    ids=["each shape of a path", "every path"],
)
def test_request_without_credentials_is_refused_for_any_spelling_of_path(
    world: World, is_whole: bool, minimum: int
) -> None:
    before = {name: site.database.content() for name, site in world.sites.items()}
    count, accepted = 0, []
    for operation, path, answer in iterate_answers(world, is_whole):
        count += 1
        # 300 is the list of versions.
        is_refused = answer.status_code == 300 or 400 <= answer.status_code < 500
        if not is_refused and not is_public(operation, path):
            accepted.append(f"{operation.service} {operation.method} {path}: {answer.status}")
    assert not accepted, f"{len(accepted)} of {count}:\n" + "\n".join(accepted[:100])
    assert count > minimum
    changed_services = [
        name for name in before if before[name] != world.sites[name].database.content()
    ]
    assert changed_services == ["identity"], "the identity service accepts the password of a login"


@pytest.mark.parametrize("path", ["/flavors", "/os-keypairs"])
def test_compute_endpoint_returns_401_if_middleware_set_no_caller(path: str) -> None:
    class NoAuthentication:
        def process_request(self, req: ComputeHttpRequest, resp: falcon.Response) -> None:
            req.context.version = microversions.MAX

    no_services: Any = None
    in_order = [Dependencies(no_services, Policy(COMPUTE_RULES)), NoAuthentication()]
    app = falcon.App(request_type=ComputeHttpRequest, middleware=in_order)
    answered_with(app, faults.handle)
    app.add_route(path, ComputeEndpoint(by_path(ROUTES)[path], ""))
    assert TestClient(app).simulate_get(path).status_code == 401
