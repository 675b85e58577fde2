# SPDX-License-Identifier: Apache-2.0
"""Write down what Nova says of its API: every operation with its versions, statuses and schemas, as
one JSON file.

Run by deploy/environment.py with the Python of an environment that has Nova: ``python reader.py
FILE``. Nothing of ours is imported here, and nothing of Nova's anywhere else but in judge.py.
"""

import json
import sys
from typing import Any

from nova.api.openstack import api_version_request as versions
from nova.api.openstack.compute import routes

LOWEST, HIGHEST = 1, versions.max_api_version().ver_minor


def minor(version: Any, otherwise: int) -> int:
    """The N of 2.N; a range without this end says nothing."""
    found = (
        versions.APIVersionRequest(version)
        if isinstance(version, str) or version is None
        else version
    )
    return otherwise if found.is_null() else found.ver_minor


def ranges(found: Any) -> list[tuple[int, int, Any]]:
    """(first version, last version, what holds) of each range that the API still serves."""
    listed = [(minor(since, LOWEST), minor(until, HIGHEST), what) for what, since, until in found]
    return sorted((entry for entry in listed if entry[1] >= LOWEST), key=lambda entry: entry[:2])


def schemas(function: Any, kind: str) -> list[tuple[int, int, Any]]:
    kept = getattr(function, kind, None)
    return ranges(kept._schemas) if kept is not None else []


def described(function: Any) -> dict[str, Any]:
    """What the decorators of a controller's method say."""
    codes = getattr(function, "wsgi_codes", None)
    return {
        "name": function.__qualname__,
        "removed": getattr(function, "removed", False),
        "versions": (
            minor(getattr(function, "min_version", None), LOWEST),
            minor(getattr(function, "max_version", None), HIGHEST),
        ),
        "status": ranges(codes._codes) if codes is not None else [],
        "body": schemas(function, "request_body_schemas"),
        "query": schemas(function, "request_query_schemas"),
        "response": schemas(function, "response_body_schemas"),
    }


def operations() -> list[dict[str, Any]]:
    """The routes in Nova's order; of an action's route one for each key of its body."""
    found = []
    for path, methods in routes.ROUTE_LIST:
        for method, (made, name) in methods.items() if isinstance(methods, dict) else ():
            controller, others = made.args
            kinds = [controller, *others]
            if name != "action":
                found.append(
                    {
                        "method": method,
                        "path": path,
                        "key": None,
                        **described(getattr(controller, name)),
                    }
                )
                continue
            found += [
                {"method": method, "path": path, "key": key, **described(getattr(kind, function))}
                for kind in kinds
                for key, function in kind.wsgi_actions.items()
            ]
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"highest": HIGHEST, "operations": operations()}, file)
