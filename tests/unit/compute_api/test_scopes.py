# SPDX-License-Identifier: Apache-2.0
"""Rules of the house for what handlers look up and whom they ask for: within the caller's scope,
with the caller's token, and a policy's target is a record. An exception stands here with its
reason, and fails when it is not needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HANDLERS = sorted((ROOT / "compute_api").rglob("*.py"))
#: Lookups that take a scope: whose, and how many arguments they have with it.
SCOPED = {
    "flavors.show": 3,
    "servers.show": 3,
    "server_groups.show": 3,
    "keypairs.show": 3,
    "shares.show": 3,
}
#: What is looked up without, and why.
UNSCOPED = {
    "compute_api/compute/resources/external_events.py servers.show": "of any project, by the rule of the route",
    "compute_api/compute/resources/flavors.py flavors.show": "what admins change, by the rule of the route",
    "compute_api/compute/servers/actions/rebuild.py servers.show": "the server of the route again, in the transaction",
    "compute_api/compute/servers/actions/moves.py servers.show": "the server of the route again, in the transaction",
    "compute_api/compute/servers/servers.py servers.show": "the server of the route again, in the transaction",
}
#: The clients that act for the caller, who is one of their arguments.
CLIENTS = ("images", "networks")
#: Those of their methods that need none.
WITHOUT_TOKEN = {"images.url", "networks.has_service"}
#: Makes tokens of its own, for consoles.
CONSOLES = "compute_api/compute/servers/consoles.py"
COLUMNS = ("row.project_id", "row.user_id", "server.project_id", "server.user_id")
#: Targets of policies that are no row of the database, and what they are compared with.
TARGETS = {
    "compute_api/compute/resources/keypairs.py": "whose keys are asked for; the rule compares it with the caller",
    "compute_api/compute/resources/quota_sets.py": "the project of the path; the rule compares it with the caller's",
    "compute_api/compute/resources/usage.py": "the project of the path; the rule compares it with the caller's",
    "compute_api/placement/usages.py": "the project of the query; the rule compares it with the caller's",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def calls(path: Path) -> tuple[tuple[str, ast.Call], ...]:
    """Every call by the last two parts of its name: flavors.show; what ``read`` and ``write`` are
    given as one, too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.append((".".join(ast.unparse(node.func).split(".")[-2:]), node))
            if node.func.attr in ("read", "write") and node.args:
                inner = ast.Call(node.args[0], [ast.Name("tx"), *node.args[1:]], node.keywords)
                found.append((ast.unparse(node.args[0]), ast.copy_location(inner, node)))
    return tuple(found)


def exceptions(there: set[str], known: dict[str, str]) -> list[str]:
    """Those that are not known, and those that are known and no longer there."""
    return [
        *(f"{name} has none" for name in sorted(there) if name not in known),
        *(f"{name} no longer needs its exception" for name in known if name not in there),
    ]


def test_what_is_looked_up_is_the_callers() -> None:
    assert (
        exceptions(
            {
                f"{name_of(path)} {name}"
                for path in HANDLERS
                for name, call in calls(path)
                if name in SCOPED and len(call.args) < SCOPED[name]
            },
            UNSCOPED,
        )
        == []
    )


def test_neighbours_are_asked_with_the_callers_token() -> None:
    asked = [
        (path, name, call)
        for path in HANDLERS
        for name, call in calls(path)
        if name.split(".")[0] in CLIENTS and name not in WITHOUT_TOKEN
    ]
    wrong = [
        f"{name_of(path)}: {name} in line {call.lineno}"
        for path, name, call in asked
        if not any(ast.unparse(argument).split(".")[-1] == "token" for argument in call.args)
    ]
    assert wrong == []
    assert len(asked) > 30


def test_no_handler_has_a_token_that_is_not_the_callers() -> None:
    bound = [
        (name_of(path), ast.unparse(node.value))
        for path in HANDLERS
        if any(folder in name_of(path) for folder in ("/resources/", "/servers/", "/proxies/"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if "token" in {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    ]
    assert [one for one in bound if "context.token" not in one[1] and one[0] != CONSOLES] == []
    assert len(bound) > 5


def test_a_policys_target_is_a_record() -> None:
    """Of a row's columns, and of nothing that a request says."""
    assert (
        exceptions(
            {
                name_of(path)
                for path in HANDLERS
                for _, call in calls(path)
                for value in targets(call)
                if value not in COLUMNS
            },
            TARGETS,
        )
        == []
    )


def targets(call: ast.Call) -> Iterator[str]:
    """What a call of require or allows gives as a target, value by value."""
    if (
        not isinstance(call.func, ast.Attribute)
        or call.func.attr not in ("require", "allows")
        or len(call.args) < 2
    ):
        return
    target = call.args[-1]
    if isinstance(target, ast.Dict):
        yield from (ast.unparse(value) for value in target.values)
    elif ast.unparse(target) not in (
        "target",
        "_make_target(server)",
        "context",
        "self.context",
        "state.caller",
    ):
        yield ast.unparse(target)
