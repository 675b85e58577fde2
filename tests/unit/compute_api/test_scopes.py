# SPDX-License-Identifier: Apache-2.0
"""Rules for the code of handlers.

Lookups are limited to the caller's scope, external services are called with the caller's token, and
the target of a policy rule comes from a row. Exceptions are listed here with a reason. An exception
that is not needed fails a test.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HANDLERS = sorted((ROOT / "compute_api").rglob("*.py"))
#: Lookups with a scope, and their number of arguments with it.
SCOPED = {
    "flavors.show": 3,
    "servers.show": 3,
    "server_groups.show": 3,
    "keypairs.show": 3,
    "shares.show": 3,
}
#: Lookups without a scope, and the reason.
UNSCOPED = {
    "compute_api/compute/resources/external_events.py servers.show": "of any project, by the rule of the route",
    "compute_api/compute/resources/flavors.py flavors.show": "what admins change, by the rule of the route",
    "compute_api/compute/servers/actions/rebuild.py servers.show": "the server of the route again, in the transaction",
    "compute_api/compute/servers/actions/moves.py servers.show": "the server of the route again, in the transaction",
    "compute_api/compute/servers/servers.py servers.show": "the server of the route again, in the transaction",
}
#: The clients that act for the caller and take the caller's token as an argument.
CLIENTS = ("images", "networks")
#: Methods of these clients without a token.
WITHOUT_TOKEN = {"images.url", "networks.has_service"}
#: This module creates tokens of its own, for consoles.
CONSOLES = "compute_api/compute/servers/consoles.py"
COLUMNS = ("row.project_id", "row.user_id", "server.project_id", "server.user_id")
#: Files with policy targets that come from a request, and the reason.
TARGETS = {
    "compute_api/compute/resources/keypairs.py": "the owner of the keys, which the rule compares with the caller",
    "compute_api/compute/resources/quota_sets.py": "the project of the path; the rule compares it with the caller's",
    "compute_api/compute/resources/usage.py": "the project of the path; the rule compares it with the caller's",
    "compute_api/placement/usages.py": "the project of the query; the rule compares it with the caller's",
}


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def find_calls(path: Path) -> tuple[tuple[str, ast.Call], ...]:
    """Return every call by the last two parts of its name, for example ``flavors.show``.

    Functions that are passed to ``read`` and ``write`` count as calls, too.
    """
    named_calls = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named_calls.append((".".join(ast.unparse(node.func).split(".")[-2:]), node))
            if node.func.attr in ("read", "write") and node.args:
                inner = ast.Call(node.args[0], [ast.Name("tx"), *node.args[1:]], node.keywords)
                named_calls.append((ast.unparse(node.args[0]), ast.copy_location(inner, node)))
    return tuple(named_calls)


def compare(violations: set[str], reasons: dict[str, str]) -> list[str]:
    """Return the violations without an exception, and the exceptions without a violation."""
    return [
        *(f"{name} has none" for name in sorted(violations) if name not in reasons),
        *(f"{name} no longer needs its exception" for name in reasons if name not in violations),
    ]


def test_handlers_look_up_rows_in_scope_of_caller() -> None:
    assert (
        compare(
            {
                f"{relative_name(path)} {name}"
                for path in HANDLERS
                for name, call in find_calls(path)
                if name in SCOPED and len(call.args) < SCOPED[name]
            },
            UNSCOPED,
        )
        == []
    )


def test_handlers_call_external_services_with_token_of_caller() -> None:
    client_calls = [
        (path, name, call)
        for path in HANDLERS
        for name, call in find_calls(path)
        if name.split(".")[0] in CLIENTS and name not in WITHOUT_TOKEN
    ]
    violations = [
        f"{relative_name(path)}: {name} in line {call.lineno}"
        for path, name, call in client_calls
        if not any(ast.unparse(argument).split(".")[-1] == "token" for argument in call.args)
    ]
    assert violations == []
    assert len(client_calls) > 30


def test_handlers_bind_no_token_except_token_of_caller() -> None:
    bindings = [
        (relative_name(path), ast.unparse(node.value))
        for path in HANDLERS
        if any(
            folder in relative_name(path) for folder in ("/resources/", "/servers/", "/proxies/")
        )
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if "token" in {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    ]
    assert [
        pair for pair in bindings if "context.token" not in pair[1] and pair[0] != CONSOLES
    ] == []
    assert len(bindings) > 5


def test_handlers_take_policy_targets_from_rows() -> None:
    """The values are columns of a row. ``TARGETS`` lists the exceptions with their reasons."""
    assert (
        compare(
            {
                relative_name(path)
                for path in HANDLERS
                for _, call in find_calls(path)
                for value in find_targets(call)
                if value not in COLUMNS
            },
            TARGETS,
        )
        == []
    )


def find_targets(call: ast.Call) -> Iterator[str]:
    """Yield the values of the policy target in a call of ``require`` or ``allows``."""
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
