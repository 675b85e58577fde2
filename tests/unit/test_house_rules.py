# SPDX-License-Identifier: Apache-2.0
"""The house's rules that a machine can check: who may import what, how long things are, what is
forbidden.

import-linter (setup.cfg) holds the floors between our own packages; this walks every source file
for the rest. An exception stands in a table here with its reason, and fails the test once it is no
longer needed.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "compute_api", "conductor", "scheduler", "compute_agent", "deploy")
LONGEST_FILE, LONGEST_FUNCTION = 600, 70  # lines as ruff format writes them

#: imported package -> where it may be imported
PLACES = {
    "sqlalchemy": ("common/store/", "deploy/standalone/"),
    "alembic": ("common/store/",),
    "oslo_messaging": ("common/rpc/",),
    "kombu": ("common/rpc/",),
    "oslo_service": ("common/rpc/",),
    "libvirt": ("compute_agent/virt/libvirt/connection.py",),
    "falcon": ("compute_api/", "deploy/standalone/"),
    "gunicorn": ("compute_api/", "deploy/standalone/"),
    "re2": ("common/patterns.py",),
    "keystonemiddleware": ("compute_api/", "deploy/standalone/"),
    "oslo_policy": ("compute_api/",),
    "numpy": ("scheduler/",),
    "prometheus_client": ("common/metrics.py", "conductor/gauges.py"),
    "pycdlib": ("compute_agent/config_drive.py",),
    "eventlet": (),
    "gevent": (),
    "mock": (),
}
PURE = (
    *(
        f"common/{name}.py"
        for name in (
            "states",
            "models",
            "errors",
            "ids",
            "clock",
            "wire",
            "json_types",
            "instance_data",
            "request_spec",
            "server_facts",
        )
    ),
    *(
        str(path.relative_to(ROOT))
        for folder in ("hardware", "numa", "notifications")
        for path in sorted((ROOT / "common" / folder).glob("*.py"))
        if path != ROOT / "common/notifications/options.py"
    ),
)

#: What others see and has no type, and why.
ANY = {
    "common/json_types.py: JsonValue": "a schema or a service defines it",
    "common/rpc/broker.py: Connection": "kombu declares no types",
    "common/rpc/broker.py: Channel": "kombu declares no types",
    "compute_api/edge/server.py: ServerLog.setup": "gunicorn declares no types",
    "compute_agent/virt/libvirt/connection.py: Connection.ask": "libvirt declares no types",
    "compute_agent/virt/libvirt/connection.py: Connection.on": "libvirt declares no types",
    "compute_agent/virt/libvirt/connection.py: Connection.mark": "fields of a record, by name",
    **dict.fromkeys(
        [
            f"deploy/seed.py: Seed.{name}"
            for name in ("connect", "admin", "demo", "server", "first")
        ],
        "openstacksdk gives a type for each version of a service",
    ),
    "deploy/standalone/json_types.py: JsonValue": "a schema defines it",
    "deploy/standalone/listing.py: contains": "a column of any type",
    "deploy/standalone/listing.py: gathered": "a column of any type",
    "deploy/standalone/volume/listing.py: of_pairs": "a column of any type",
    "deploy/standalone/resource.py: AnyCaller": "each service has its own",
    "deploy/standalone/resource.py: AnyChange": "each service has its own",
    "deploy/standalone/resource.py: AnyService": "each service has its own",
    "deploy/standalone/resource.py: Transaction.execute": "SQLAlchemy's result of any statement",
    "deploy/standalone/web.py: application": "falcon declares no type of middleware",
}

#: Files that start threads or sleep outside a service.py, and why.
THREADS = {
    "common/store/engine.py": "waits a random moment before it repeats a deadlocked transaction",
    "common/rpc/transport.py": "a call must end within its time although the library waits for the broker without end",
    "common/rpc/broker.py": "one thread listens to the broker beside whatever else a process does",
    "common/rpc/host_link.py": "what hosts say and are asked may take time, and holds up no other message",
    "common/rpc/conductor.py": "wakeup messages are sent from one thread so that the API never waits for the broker",
    "common/clients/identity.py": "a silent identity service must hold whoever needs a token for a moment only",
    "common/clients/limits.py": "a silent identity service must hold whoever needs a limit for a moment only",
    "common/clients/vendor_data.py": "a target that never ends its answer must hold a boot for a moment only",
    "common/tracing.py": "a collector that is silent must hold the end of a process for a moment only",
    "compute_api/edge/health.py": "a dependency that is silent must hold who asks for a moment only",
    "compute_api/console/sessions.py": "what a guest says needs a thread beside what its browser says",
    "compute_agent/volume_helper.py": "a target that does not answer must hold up no other volume of the host",
    "compute_agent/consoles.py": "a listener and two threads a session carry bytes between sockets that block",
    "compute_agent/direct_consoles.py": "a thread for each port of a proxy's, and for each connection to it",
    "compute_agent/relay.py": "a connection has one thread for each direction",
    "compute_agent/transfer/client.py": "waits before it connects again to a host that broke a connection off",
    "compute_agent/virt/memory/consoles.py": "a guest in memory answers on its console",
    "compute_agent/virt/libvirt/incoming/proxy.py": "a listener and two threads a connection, whose times it keeps",
    "compute_agent/virt/libvirt/connection.py": "libvirt's event loop needs a thread, and so do those it tells",
    "compute_agent/virt/libvirt/driver.py": "repeats a verb after libvirtd was away",
    "compute_agent/virt/libvirt/incoming_migration.py": "looks again whether an incoming guest is whole",
    "compute_agent/virt/libvirt/jobs.py": "looks how far libvirt is, while another thread waits for its answer",
    "compute_agent/virt/libvirt/volume_copies.py": "looks how far QEMU has copied",
    "compute_agent/virt/libvirt/assisted_snapshots.py": "looks how far QEMU has merged",
    "compute_agent/virt/libvirt/live_migration.py": "looks how far a migration is, while libvirt is at it",
    "compute_agent/virt/libvirt/power.py": "looks again whether a guest has powered off, while its verb runs",
    "compute_agent/virt/libvirt/unplugging.py": "looks again whether a guest has let go of an interface",
    "compute_agent/virt/interfaces.py": "tries again while a bridge is not there yet",
    "compute_agent/virt/libvirt/images.py": "writes to the network from a thread of its own, to notice a cancel",
    "compute_agent/virt/libvirt/background_reads.py": "reads from the network in a thread, to notice a cancel",
    "compute_agent/virt/memory/script.py": "a verb that is scripted to be slow",
}
STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "sleep"}
#: Files that give ``re`` a pattern that is no constant, and why it is none of a user's.
PATTERNS = {
    "common/host_options.py": "the form of an option, written beside it",
    "common/broker_identities.py": "the name of a host, quoted, for permissions at the broker",
    "common/store/servers/servers.py": "the letters of an address, from a table",
    "compute_agent/volume_helper.py": "the form of what a connection says, from a table",
    "compute_api/compute/extra_specs.py": "the form of an extra spec, from a table",
    "compute_api/edge/validation.py": "the names that a schema of ours allows",
}
#: Programs and libraries that mount a file system, or read one's structure; no file system of a
#: guest is ever mounted.
MOUNTING = {
    "mount",
    "umount",
    "umount2",
    "fsmount",
    "move_mount",
    "losetup",
    "kpartx",
    "partx",
    "qemu-nbd",
    "nbdfuse",
    "guestmount",
    "guestfs",
    "guestfish",
    "guestunmount",
    "virt-customize",
    "virt-sysprep",
    "virt-cat",
    "virt-edit",
    "debugfs",
    "fuse2fs",
    "fuseiso",
    "udisksctl",
}
#: What starts the program that is named behind it.
LAUNCHERS = {"sudo", "unshare", "nsenter", "env", "setpriv"}
#: Files that mount something all the same, and what.
MOUNTS = {
    "compute_agent/virt/libvirt/host_connectors.py": "an export whose files are volumes, by the host's mounts",
    "deploy/libvirtd.py": "folders of its own over libvirt's; /proc and /sys of its namespaces",
    "deploy/inside.py": "nothing, over the folders of other hosts; a host's own boot id",
    "deploy/machine.py": "tries whether folders can be mounted here",
    "deploy/standalone/volume/exports.py": "nothing: qemu-nbd serves a volume, no device is made of it",
    "compute_agent/virt/mounts.py": "shares of the shared file system service, by NFS",
    "compute_agent/virt/libvirt/driver.py": "shares, by virt/mounts.py",
    "compute_agent/virt/libvirt/guests.py": "shares, by virt/mounts.py",
    "compute_agent/virt/libvirt/shares.py": "shares, by virt/mounts.py",
    "compute_agent/virt/libvirt/share_xml.py": "nothing: libvirt's word for what virtiofs shows",
    "compute_agent/sandbox/lockdown.py": "nothing: it forbids these system calls",
}
COMMANDS = "deploy/"  # commands wait for processes, in the foreground


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


EVERY = pytest.mark.parametrize("path", sources(*PACKAGES, "tests"), ids=name_of)
OURS = pytest.mark.parametrize("path", sources(*PACKAGES), ids=name_of)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's: to go through its tree costs more than what a rule looks for."""
    return list(ast.walk(parsed(path)))


def last_name(function: ast.expr) -> str:
    """Of what is called: "b" of ``a.b``."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names of absolute imports with their lines."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@EVERY
def test_file_says_its_licence_and_what_it_is(path: Path) -> None:
    if not path.read_text():
        return  # an empty __init__.py
    lines = path.read_text().splitlines()
    assert "# SPDX-License-Identifier: Apache-2.0" in lines[:2]
    assert ast.get_docstring(parsed(path)), "no module docstring"
    assert path.name not in ("utils.py", "helpers.py", "manager.py", "base.py"), (
        "name it after its noun"
    )


@EVERY
def test_nothing_is_too_long(path: Path) -> None:
    lines = path.read_text().splitlines()
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    }
    if "upgrades/versions" not in name_of(path):  # written once, as long as its tables are
        assert len(lines) <= LONGEST_FILE
        assert long == {}


@OURS
def test_packages_are_imported_only_where_they_belong(path: Path) -> None:
    name = name_of(path)
    wrong = [
        (line, module)
        for module, line in imports(path)
        if not name.startswith(PLACES.get(module.split(".")[0], (name,)))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", PURE)
def test_ground_floor_is_pure_python(name: str) -> None:
    foreign = {
        module
        for module, _ in imports(ROOT / name)
        if module.split(".")[0] not in {*sys.stdlib_module_names, "common"}
    }
    assert foreign == set()


@pytest.mark.parametrize("command", ["up", "down", "lab", "test"])
def test_commands_begin_where_nothing_is_installed(command: str) -> None:
    """They install what the rest needs; -S leaves installed packages out."""
    begun = subprocess.run(
        [sys.executable, "-S", "-c", f"import deploy.commands.{command}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert begun.returncode == 0, begun.stderr


def test_commands_and_services_do_without_alembic() -> None:
    """It is slow to import, and only for those who upgrade."""
    code = (
        "import importlib, sys; from deploy.cli.commands import COMMANDS\n"
        "for module, _, _ in COMMANDS.values(): importlib.import_module(module)\n"
        "import compute_api.compute.service, conductor.service, scheduler.service; print('alembic' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout.strip() == "False"


@OURS
def test_threads_and_sleeps_are_in_the_service_of_a_process(path: Path) -> None:
    name = name_of(path)
    if path.name == "service.py" or name.startswith(COMMANDS):
        return
    found = [
        f"{ast.unparse(node.func)} in line {node.lineno}"
        for node in nodes(path)
        if isinstance(node, ast.Call) and last_name(node.func) in STARTERS
    ]
    assert bool(found) == (name in THREADS), found or f"{name} no longer needs its exception"


@OURS
def test_no_shell_and_no_swallowed_error(path: Path) -> None:
    wrong = []
    for node in nodes(path):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            wrong.append(f"shell= in line {node.value.lineno}")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("system", "popen")
            and ast.unparse(node.value) == "os"
        ):
            wrong.append(f"os.{node.attr} in line {node.lineno}")
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if broad and all(isinstance(part, (ast.Pass, ast.Continue)) for part in node.body):
                wrong.append(f"swallowed error in line {node.lineno}")
    assert wrong == []


def mounting(within: Sequence[ast.AST]) -> list[str]:
    """Where a program or function of ``MOUNTING`` is named, outside of docstrings."""
    said = {id(node.value) for node in within if isinstance(node, ast.Expr)}
    found = []
    for node in within:
        words: set[str] = set()
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            first, *rest = node.value.split() or [""]
            words = (
                {Path(word).name for word in ([first, *rest] if first in LAUNCHERS else [first])}
                if len(rest) < 12
                else set()
            )
        elif isinstance(node, ast.Attribute):
            words = {node.attr}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            words = {part for alias in node.names for part in alias.name.split(".")}
        found += [f"{word} in line {node.lineno}" for word in words & MOUNTING]
    return found


@OURS
def test_no_file_system_of_a_guest_is_mounted(path: Path) -> None:
    found, name = mounting(nodes(path)), name_of(path)
    assert bool(found) == (name in MOUNTS), found or f"{name} no longer needs its exception"


@pytest.mark.parametrize(
    "text",
    [
        "run(['mount', '-o', 'loop', disk, folder])",
        "run('/usr/bin/guestmount', '-a', disk)",
        "libc.mount(a, b)",
        "import guestfs",
        "subprocess.run('sudo mount /dev/nbd0 /mnt'.split())",
        "bounded('qemu-nbd', '-c', device)",
    ],
)
def test_what_mounts_is_seen(text: str) -> None:
    assert len(mounting([*ast.walk(ast.parse(text))])) == 1


def is_any(annotation: ast.expr | None) -> bool:
    """Does it say ``Any``, in quotes or without?"""
    return annotation is not None and any(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Constant) and re.search(r"\bAny\b", str(node.value)) is not None)
        for node in ast.walk(annotation)
    )


def untyped(body: Sequence[ast.stmt], within: str = "") -> Iterator[str]:
    """What others see, and may be of any type: public functions, methods and fields of public
    classes, and names for ``Any`` itself."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            given = node.args
            every = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
            annotations = [node.returns, *(one.annotation for one in every if one is not None)]
            is_public = not node.name.startswith("_") or node.name.endswith("__")
            if is_public and any(map(is_any, annotations)):
                yield within + node.name
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from untyped(node.body, f"{within}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and within and is_any(node.annotation):
            if not (name := ast.unparse(node.target)).startswith("_"):
                yield within + name
        elif isinstance(node, ast.Assign) and ast.unparse(node.value) == "Any":
            yield within + ast.unparse(node.targets[0])


def test_what_others_see_has_types() -> None:
    """Names that are not in the table are new; a name in the table that is not found has got a
    type: take it out."""
    found = {
        f"{name_of(path)}: {name}"
        for path in sources(*PACKAGES)
        for name in untyped(parsed(path).body)
    }
    assert found == set(ANY)


@pytest.mark.parametrize(
    "text",
    [
        "def f(a: Any): ...",
        "def f(*a: Any, **b: int): ...",
        "def f() -> list[Any]: ...",
        "class A:\n    def __init__(self, a: 'Any'): ...",
        "class A:\n    a: dict[str, Any]",
        "Handle = Any",
    ],
)
def test_what_may_be_of_any_type_is_seen(text: str) -> None:
    assert list(untyped(ast.parse(text).body))


@pytest.mark.parametrize(
    "text",
    [
        "def _f(a: Any): ...",
        "def f(a: AnyRun): ...",
        "class _A:\n    a: Any",
        "def f(a: object): ...",
    ],
)
def test_what_has_a_type_or_is_nobody_elses_is_not(text: str) -> None:
    assert not list(untyped(ast.parse(text).body))


def is_of_the_source(pattern: ast.expr) -> bool:
    """Is it a constant, or made of constants alone?"""
    if isinstance(pattern, ast.JoinedStr):
        return all(is_of_the_source(part) for part in pattern.values)
    if isinstance(pattern, ast.FormattedValue):
        return is_of_the_source(pattern.value)
    if isinstance(pattern, ast.Call):  # "|".join(NAMES)
        return (
            isinstance(pattern.func, ast.Attribute)
            and pattern.func.attr == "join"
            and all(is_of_the_source(part) for part in (pattern.func.value, *pattern.args))
        )
    return isinstance(pattern, ast.Constant) or ast.unparse(pattern).split(".")[-1].isupper()


@OURS
def test_python_is_given_no_pattern_of_a_user(path: Path) -> None:
    """Its engine goes back, and holds the interpreter's lock meanwhile; users' patterns are
    ``common.patterns``."""
    name = name_of(path)
    asked = [
        node
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "re"
    ]
    variable = [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in asked
        if not is_of_the_source(node.args[0])
    ]
    assert bool(variable) == (name in PATTERNS), variable or f"{name} no longer needs its exception"
    assert not {"sre_parse", "sre_compile"} & {module.split(".")[0] for module, _ in imports(path)}
    private = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in ("_parser", "_compiler")
        and ast.unparse(node.value) == "re"
    ]
    matched = [
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in ("regexp_match", "regexp_replace")
        and name != "common/store/regular_expressions.py"
    ]
    assert (private, matched) == ([], [])


@pytest.mark.parametrize("path", sources("tests"), ids=name_of)
def test_tests_use_the_real_thing(path: Path) -> None:
    assert [
        module
        for module, _ in imports(path)
        if module.split(".")[0] == "mock" or "unittest.mock" in module
    ] == []


@pytest.mark.parametrize("path", sources("tests"), ids=name_of)
def test_a_sleep_of_a_test_says_why_it_must_be(path: Path) -> None:
    """In a comment on its line or on the one before; loops that ask are ``tests.waiting``."""
    slept = {
        node.lineno
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and last_name(node.func) == "sleep"
        and ast.unparse(node.func) in ("time.sleep", "sleep")
    }
    if not slept:
        return
    with path.open("rb") as file:
        said = {
            token.start[0]
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.COMMENT
        }
    assert [line for line in sorted(slept) if not {line, line - 1} & said] == []
