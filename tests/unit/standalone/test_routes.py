# SPDX-License-Identifier: Apache-2.0
"""docs/one-machine.md has each route of the embedded services with its consumers."""

import re
from pathlib import Path
from typing import Any

import pytest
from falcon import inspect

from deploy.one_machine.services.identity import app as identity
from deploy.one_machine.services.image import app as image
from deploy.one_machine.services.network import app as network
from deploy.one_machine.services.volume import app as volume

PAGE = Path(__file__).resolve().parents[3] / "docs/one-machine.md"
ROUTE = re.compile(r"`((?:GET|POST|PUT|PATCH|DELETE)(?:, [A-Z]+)*) (/[^`]*)`")
APPS = {"identity": identity, "image": image, "network": network, "volume": volume}


def documented(service: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return (method, path) of the table of a service; a path is the pattern of a template."""
    table = PAGE.read_text().partition(f"\n| {service} | for |\n")[2].partition("\n\n")[0]
    routes = []
    for methods, path in ROUTE.findall(table):
        pattern = re.sub(r"\\{\w+\\}", r"{\\w+}", re.escape(path))
        pattern = re.sub(r"\\\\\\([|])|\\([()|_-])", r"\1\2", pattern)
        routes += [(method, re.compile(pattern)) for method in methods.split(", ")]
    return routes


def served(service: str) -> set[tuple[str, str]]:
    nothing: Any = None
    return {
        (method.method, route.path)
        for route in inspect.inspect_routes(APPS[service].build(nothing))
        for method in route.methods
        if not method.internal
    }


@pytest.mark.parametrize("service", APPS)
def test_each_route_of_embedded_service_has_its_consumers_in_docs(service: str) -> None:
    operations, rows = served(service), documented(service)
    for method, path in operations:
        matching = [row for row in rows if row[0] == method and row[1].fullmatch(path)]
        assert len(matching) == 1, (method, path, matching)
    for method, pattern in rows:
        assert any(one == method and pattern.fullmatch(path) for one, path in operations), pattern
