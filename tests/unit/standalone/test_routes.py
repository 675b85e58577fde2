# SPDX-License-Identifier: Apache-2.0
"""The table of routes of the embedded services in docs/one-machine.md against the applications."""

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


def read_documented_routes(service: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return (method, pattern of the route's template) of each row in the table of a service."""
    table = PAGE.read_text().partition(f"\n| {service} | for |\n")[2].partition("\n\n")[0]
    routes = []
    for methods, path in ROUTE.findall(table):
        pattern = re.sub(r"\\{\w+\\}", r"{\\w+}", re.escape(path))
        pattern = re.sub(r"\\\\\\([|])|\\([()|_-])", r"\1\2", pattern)
        routes += [(method, re.compile(pattern)) for method in methods.split(", ")]
    return routes


def list_routes(service: str) -> set[tuple[str, str]]:
    state: Any = None
    return {
        (method.method, route.path)
        for route in inspect.inspect_routes(APPS[service].build(state))
        for method in route.methods
        if not method.internal
    }


@pytest.mark.parametrize("service", APPS)
def test_embedded_service_routes_equal_table_in_docs(service: str) -> None:
    operations, rows = list_routes(service), read_documented_routes(service)
    for method, path in operations:
        matching = [row for row in rows if row[0] == method and row[1].fullmatch(path)]
        assert len(matching) == 1, (method, path, matching)
    for method, pattern in rows:
        assert any(
            operation_method == method and pattern.fullmatch(path)
            for operation_method, path in operations
        ), pattern
