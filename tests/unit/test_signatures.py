# SPDX-License-Identifier: Apache-2.0
"""Public functions of the conductor and the store pass records, not dictionaries or long tuples.

A dictionary from ids or names to values, for example ``dict[str, int]``, is not a record.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.test_house_rules import ROOT

UNTYPED = {"JsonObject", "JsonMapping", "JsonValue"}
#: Reason -> file -> public functions with JSON, a dictionary of anything, or a long tuple.
EXCEPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "encodes or decodes": {
        "conductor/engine/action_data.py": ("fault_of", "journal"),
        "conductor/steps/claims.py": ("ClaimedHost.guest",),
        "conductor/hosts/host_credentials.py": ("HostJoins.join", "HostSecretsSource.fetch"),
        "conductor/steps/moves.py": ("assignment_of", "flavor_columns"),
        "conductor/engine/run.py": ("Run.secrets",),
        "common/store/connections.py": ("connect_arguments",),
        "common/store/hosts/host_images.py": ("ask", "take"),
        "common/store/placement/inventories.py": ("capacity", "put"),
        "common/store/servers/volumes.py": ("local_names",),
    },
    "a document of another service": {
        "conductor/engine/external_services.py": (
            *("ImageApi.create", "ImageApi.find", "VolumeApi.attach", "VolumeApi.connect"),
            *(
                f"NetworkApi.{name}"
                for name in ("bind_also", "create", "described", "port", "ports", "update")
            ),
        ),
        "conductor/steps/service_clients.py": (
            *("BlockStorageService.attach", "BlockStorageService.connect"),
            *("ImageService.create", "ImageService.find"),
            *(
                f"NetworkService.{name}"
                for name in ("bind_also", "create", "described", "port", "ports", "update")
            ),
        ),
        "conductor/steps/images.py": ("check", "rotate"),
        "conductor/steps/volumes.py": ("connect", "connector_of", "let_connect"),
    },
    "facts of a host, which filters read by name": {
        "conductor/steps/moves.py": ("claim", "compare_hosts"),
        "common/store/hosts/hosts.py": ("facts_of", "list_all"),
    },
    "arguments of actions and of verbs": {
        "conductor/hosts/host_actions.py": ("move_args",),
        "conductor/workflows/assisted_snapshots.py": (
            "read_connection_file",
            "set_connection_file",
        ),
    },
}


def test_public_signatures_have_typed_records() -> None:
    exceptions = [
        f"{path}: {name}"
        for files in EXCEPTIONS.values()
        for path, names in files.items()
        for name in names
    ]
    assert sorted(find_untyped()) == sorted(exceptions)


def find_untyped() -> Iterator[str]:
    for package in ("conductor", "common/store"):
        for path in sorted((ROOT / package).rglob("*.py")):
            # Notifications are documents in Nova's format.
            if not {"upgrades", "notifications"} & set(path.relative_to(ROOT).parts):
                for name, function in public_functions(ast.parse(path.read_text()).body):
                    if any(is_untyped(hint) for hint in hints(function)):
                        yield f"{path.relative_to(ROOT)}: {name}"


def public_functions(
    body: list[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node.body, f"{node.name}.")
            else:
                yield f"{prefix}{node.name}", node


def hints(function: ast.FunctionDef) -> list[ast.expr]:
    arguments = function.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    annotations = [*(parameter.annotation for parameter in parameters), function.returns]
    return [hint for hint in annotations if hint is not None]


def is_untyped(hint: ast.expr) -> bool:
    """Return True if the hint contains JSON, ``dict[str, object]`` or a tuple of more than two."""
    for part in ast.walk(hint):
        if isinstance(part, ast.Name) and part.id in UNTYPED:
            return True
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Tuple):
            kind, values = ast.unparse(part.value), part.slice.elts
            if kind == "tuple" and len(values) > 2:
                return True
            if kind == "dict" and ast.unparse(values[1]) in ("object", "Any"):
                return True
    return False
