# SPDX-License-Identifier: Apache-2.0
"""A program that writes Nova's operations to a JSON file, with versions, statuses and schemas.

deploy/environment.py runs ``python reader.py FILE`` with the Python of an environment with Nova.
The program must not import Kilonova. Only this program and judge.py import Nova.
"""

import json
import sys
from typing import Any

from nova.api.openstack import api_version_request as versions
from nova.api.openstack.compute import routes

LOWEST, HIGHEST = 1, versions.max_api_version().ver_minor


def read_minor(version: Any, default: int) -> int:
    """Return the N of version 2.N, or the default for a null version, the open end of a range."""
    request = (
        versions.APIVersionRequest(version)
        if isinstance(version, str) or version is None
        else version
    )
    return default if request.is_null() else request.ver_minor


def read_ranges(entries: Any) -> list[tuple[int, int, Any]]:
    """Return (first version, last version, value) of each range with supported versions."""
    ranges = [
        (read_minor(since, LOWEST), read_minor(until, HIGHEST), value)
        for value, since, until in entries
    ]
    return sorted((entry for entry in ranges if entry[1] >= LOWEST), key=lambda entry: entry[:2])


def read_schemas(function: Any, kind: str) -> list[tuple[int, int, Any]]:
    schemas = getattr(function, kind, None)
    return read_ranges(schemas._schemas) if schemas is not None else []


def describe(function: Any) -> dict[str, Any]:
    """Return the facts that the decorators of a controller's method declare."""
    codes = getattr(function, "wsgi_codes", None)
    return {
        "name": function.__qualname__,
        "removed": getattr(function, "removed", False),
        "versions": (
            read_minor(getattr(function, "min_version", None), LOWEST),
            read_minor(getattr(function, "max_version", None), HIGHEST),
        ),
        "status": read_ranges(codes._codes) if codes is not None else [],
        "body": read_schemas(function, "request_body_schemas"),
        "query": read_schemas(function, "request_query_schemas"),
        "response": read_schemas(function, "response_body_schemas"),
    }


def read_operations() -> list[dict[str, Any]]:
    """Return the operations in the order of Nova's routes.

    A route for actions becomes one operation for each key of the body.
    """
    operations = []
    for path, methods in routes.ROUTE_LIST:
        for method, (factory, name) in methods.items() if isinstance(methods, dict) else ():
            controller, others = factory.args
            controllers = [controller, *others]
            if name != "action":
                operations.append(
                    {
                        "method": method,
                        "path": path,
                        "key": None,
                        **describe(getattr(controller, name)),
                    }
                )
                continue
            operations += [
                {"method": method, "path": path, "key": key, **describe(getattr(owner, function))}
                for owner in controllers
                for key, function in owner.wsgi_actions.items()
            ]
    return operations


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"highest": HIGHEST, "operations": read_operations()}, file)
