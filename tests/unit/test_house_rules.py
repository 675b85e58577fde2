# SPDX-License-Identifier: Apache-2.0
"""Rules for the source that ruff and import-linter cannot check.

Each rule is one test over all files. Its failure lists every file and line that breaks the rule.
An exception to a rule is in a table here, with its reason. The test also fails when an exception
is no longer needed.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "compute_api", "conductor", "scheduler", "compute_agent", "deploy")

#: ``common.domain.patterns`` is the one module with re2.
PURE = tuple(
    str(path.relative_to(ROOT))
    for folder in ("domain", "notifications")
    for path in sorted((ROOT / "common" / folder).rglob("*.py"))
    if path.name != "patterns.py"
)

#: Files that start threads or sleep outside a service.py, and why.
THREADS = {
    "common/store/engine.py": "waits a random moment before it repeats a deadlocked transaction",
    "common/rpc/transport.py": "a call must end within its time although the library waits for the broker without end",
    "common/rpc/host_bindings.py": "bindings change while a flood keeps the listening thread busy",
    "common/rpc/door_watch.py": "a node that hangs must not delay the messages of hosts",
    "common/rpc/broker_client.py": "a listener reads from the broker beside the other work of a process",
    "common/rpc/host_link.py": "slow messages and queries of hosts must not delay other messages",
    "common/rpc/newest_first.py": "a slow request of a host must not delay the newer requests of others",
    "common/rpc/conductor.py": "wakeup messages are sent from one thread so that the API never waits for the broker",
    "common/clients/identity.py": "a silent identity service may delay callers that need a token only briefly",
    "common/clients/limits.py": "a silent identity service may delay callers that need a limit only briefly",
    "common/clients/vendor_data.py": "a target that never ends its answer may delay a boot only briefly",
    "common/service/tracing.py": "a silent collector may delay the end of a process only briefly",
    "compute_api/http/worker/worker.py": "waiting requests must not delay other requests",
    "compute_api/http/health.py": "a silent dependency may delay a health check only briefly",
    "compute_api/console/sessions.py": "guest and browser need one thread for each direction",
    "compute_agent/privileged/volume_helper.py": "a silent target must not block other volumes",
    "compute_agent/consoles/consoles.py": "a listener, and two threads a session that copy bytes",
    "compute_agent/consoles/direct_consoles.py": "a thread for each port of a proxy, and for each connection",
    "compute_agent/consoles/relay.py": "a connection has one thread for each direction",
    "compute_agent/transfer/client.py": "waits before a new connection to a host that closed the last connection",
    "compute_agent/virt/memory/state/consoles.py": "a guest in memory answers on its console",
    "compute_agent/virt/libvirt/migration/incoming/proxy.py": "a listener, and two threads for each connection",
    "compute_agent/virt/libvirt/domains/connection.py": "libvirt's event loop and its callbacks need a thread each",
    "compute_agent/virt/libvirt/driver.py": "repeats a verb after a restart of libvirtd",
    "compute_agent/virt/libvirt/migration/incoming_migration.py": "polls until an incoming guest is complete",
    "compute_agent/virt/libvirt/domains/jobs.py": "polls the progress of a job of libvirt",
    "compute_agent/virt/libvirt/volumes/volume_copies.py": "polls the progress of a copy in QEMU",
    "compute_agent/virt/libvirt/guests/assisted_snapshots.py": "polls the progress of a merge in QEMU",
    "compute_agent/virt/libvirt/migration/live_migration.py": "polls the progress of a migration",
    "compute_agent/virt/libvirt/domains/power.py": "polls until a guest has powered off",
    "compute_agent/virt/libvirt/domains/unplugging.py": "polls until a guest has released an interface",
    "compute_agent/virt/interfaces.py": "repeats until a bridge exists",
    "compute_agent/virt/libvirt/disks/images.py": "writes to the network in a thread, to notice a cancel",
    "compute_agent/virt/libvirt/disks/background_reads.py": "reads from the network in a thread, to notice a cancel",
    "compute_agent/virt/memory/state/script.py": "delays a verb as a test scripts",
}
STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Process", "sleep"}
#: Files that pass a variable pattern to ``re`` -> the source of the pattern, which is never a user.
PATTERNS = {
    "common/service/host_options.py": "the form of an option, written beside it",
    "common/security/broker_identities.py": "the name of a host, quoted, for permissions at the broker",
    "common/store/servers/servers.py": "the letters of an address, from a table",
    "compute_agent/privileged/volume_helper.py": "the form of a connection's fields, from a table",
    "compute_api/compute/resources/extra_specs.py": "the form of an extra spec, from a table",
    "compute_api/http/validation.py": "the names that a schema in the source allows",
}
#: Programs and libraries that mount a file system or read its structure. Invariant: no file system
#: of a guest is mounted.
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
#: Programs that start the program in their arguments.
LAUNCHERS = {"sudo", "unshare", "nsenter", "env", "setpriv"}
#: Files with a name of ``MOUNTING`` -> the file system that they mount, or the reason for the name.
MOUNTS = {
    "compute_agent/virt/libvirt/volumes/host_connectors.py": "an export whose files are volumes, by the host's mounts",
    "deploy/one_machine/machine/libvirtd.py": "the cloud's folders over libvirt's, and /proc and /sys",
    "deploy/one_machine/machine/inside.py": "hides the folders of other hosts, and mounts the host's own boot id",
    "deploy/one_machine/machine/abilities.py": "checks that this process may mount folders",
    "deploy/one_machine/services/volume/exports.py": "nothing: qemu-nbd serves a volume without a device",
    "compute_agent/virt/mounts.py": "shares of the shared file system service, by NFS",
    "compute_agent/virt/libvirt/driver.py": "shares, by virt/mounts.py",
    "compute_agent/virt/libvirt/guests/guests.py": "shares, by virt/mounts.py",
    "compute_agent/virt/libvirt/guests/shares.py": "shares, by virt/mounts.py",
    "compute_agent/virt/libvirt/xml/share_xml.py": "nothing: libvirt's word for a virtiofs share",
    "compute_agent/sandbox/lockdown.py": "nothing: it forbids these system calls",
}
LOGGERS = {"log", "LOG", "logger", "_log"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: Members of a line of the log as JSON, and arguments of the logger, which no field may replace.
NO_FIELDS = {"time", "level", "process", "logger", "message", "exception", "msg", "args"}
#: Files whose log lines have values in the text -> the reason.
VALUES_IN_LOG = {
    "compute_agent/privileged/bridges.py": "the helper imports no other part of the project",
    "compute_agent/privileged/volume_helper.py": "the helper imports no other part of the project",
}
#: Commands wait for processes in the foreground.
COMMANDS = "deploy/"


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes_by_type(path: Path) -> dict[type, list[ast.AST]]:
    """Walk a file once for all rules, because the walk costs more than the rules."""
    nodes: dict[type, list[ast.AST]] = {}
    for node in ast.walk(parse(path)):
        nodes.setdefault(type(node), []).append(node)
    return nodes


def find(path: Path, kind: type[Node]) -> list[Node]:
    """Return the nodes of one type in a file."""
    return cast("list[Node]", nodes_by_type(path).get(kind, []))


def last_name(function: ast.expr) -> str:
    """Return "b" for a call of ``a.b`` or of ``b``."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the dotted names of absolute imports with their lines."""
    for node in find(path, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    for source in find(path, ast.ImportFrom):
        if source.level == 0 and source.module:
            yield from ((f"{source.module}.{alias.name}", source.lineno) for alias in source.names)


def breaches(rule: Callable[[Path], list[str]], exceptions: Collection[str] = ()) -> list[str]:
    """Apply a rule to the whole product.

    Returns:
        A line for each breach in a file without an exception, and for each file that no longer
        needs its exception.
    """
    places = {name_of(path): rule(path) for path in sources(*PACKAGES)}
    return [
        *(
            f"{name}: {place}"
            for name, places_of_file in places.items()
            if name not in exceptions
            for place in places_of_file
        ),
        *(f"{name}: needs no exception" for name in exceptions if not places.get(name)),
    ]


def test_source_files_have_licence_header() -> None:
    header = "# SPDX-License-Identifier: Apache-2.0"
    texts = {path: path.read_text() for path in sources(*PACKAGES, "tests")}
    assert [
        name_of(path)
        for path, text in texts.items()
        if text and header not in text.split("\n", 2)[:2]
    ] == []


def test_tracked_texts_contain_no_conflict_markers() -> None:
    marker = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
        *ROOT.glob("*.cfg"),
        *ROOT.glob("docs/**/*.md"),
    ]
    texts = {path: path.read_text() for path in [*sources(*PACKAGES, "tests"), *pages]}
    assert [name_of(path) for path, text in texts.items() if marker.search(text)] == []


def test_domain_and_notifications_of_common_import_only_common_and_stdlib() -> None:
    """``common.domain.patterns``, which imports re2, is the exception."""
    allowed = {*sys.stdlib_module_names, "common"}
    assert [
        f"{name}:{line} {module}"
        for name in PURE
        for module, line in imports(ROOT / name)
        if module.split(".")[0] not in allowed
    ] == []


def test_bootstrap_commands_import_without_installed_packages() -> None:
    """These commands install the packages. ``-S`` hides installed packages."""
    command = "from deploy.one_machine import down, lab, up; from deploy.testing import test"
    process = subprocess.run(
        [sys.executable, "-S", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    assert process.returncode == 0, process.stderr


def test_threads_and_sleeps_are_only_in_services_or_listed_files() -> None:
    def starters(path: Path) -> list[str]:
        if path.name == "service.py" or name_of(path).startswith(COMMANDS):
            return []
        return [
            f"{node.lineno} {ast.unparse(node.func)}"
            for node in find(path, ast.Call)
            if last_name(node.func) in STARTERS
        ]

    assert breaches(starters, THREADS) == []


def find_mounting(nodes: dict[type, list[ast.AST]]) -> list[str]:
    """List where a program or function of ``MOUNTING`` is named, outside of docstrings."""
    docstrings = {id(node.value) for node in nodes.get(ast.Expr, []) if isinstance(node, ast.Expr)}
    names: list[tuple[int, set[str]]] = []
    for node in nodes.get(ast.Constant, []):
        assert isinstance(node, ast.Constant)
        if isinstance(node.value, str) and id(node) not in docstrings:
            first, *rest = node.value.split() or [""]
            if len(rest) < 12:
                words = [first, *rest] if first in LAUNCHERS else [first]
                names.append((node.lineno, {Path(word).name for word in words}))
    for node in nodes.get(ast.Attribute, []):
        assert isinstance(node, ast.Attribute)
        names.append((node.lineno, {node.attr}))
    for node in (*nodes.get(ast.Import, []), *nodes.get(ast.ImportFrom, [])):
        assert isinstance(node, (ast.Import, ast.ImportFrom))
        parts = {part for alias in node.names for part in alias.name.split(".")}
        names.append((node.lineno, parts))
    return [f"{line} {word}" for line, words in names for word in words & MOUNTING]


def test_guest_file_systems_are_never_mounted() -> None:
    assert breaches(lambda path: find_mounting(nodes_by_type(path)), MOUNTS) == []


def test_mounting_rule_finds_each_form_of_mount() -> None:
    texts = [
        "run(['mount', '-o', 'loop', disk, folder])",
        "run('/usr/bin/guestmount', '-a', disk)",
        "libc.mount(a, b)",
        "import guestfs",
        "subprocess.run('sudo mount /dev/nbd0 /mnt'.split())",
        "bounded('qemu-nbd', '-c', device)",
    ]
    for text in texts:
        nodes: dict[type, list[ast.AST]] = {}
        for node in ast.walk(ast.parse(text)):
            nodes.setdefault(type(node), []).append(node)
        assert len(find_mounting(nodes)) == 1, text


def is_constant(pattern: ast.expr) -> bool:
    """Return True if a pattern is a constant of the source, or consists of such constants."""
    if isinstance(pattern, ast.JoinedStr):
        return all(is_constant(part) for part in pattern.values)
    if isinstance(pattern, ast.FormattedValue):
        return is_constant(pattern.value)
    if isinstance(pattern, ast.Call):  # "|".join(NAMES)
        return (
            isinstance(pattern.func, ast.Attribute)
            and pattern.func.attr == "join"
            and all(is_constant(part) for part in (pattern.func.value, *pattern.args))
        )
    return isinstance(pattern, ast.Constant) or ast.unparse(pattern).split(".")[-1].isupper()


def test_python_re_gets_no_user_pattern() -> None:
    """Patterns of users go through ``common.domain.patterns``.

    The engine of ``re`` backtracks and holds the interpreter's lock meanwhile.
    """

    def variable_patterns(path: Path) -> list[str]:
        return [
            f"{node.lineno} {ast.unparse(node)}"
            for node in find(path, ast.Call)
            if isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "re"
            and not is_constant(node.args[0])
        ]

    assert breaches(variable_patterns, PATTERNS) == []


def test_database_gets_no_user_pattern() -> None:
    def matches(path: Path) -> list[str]:
        return [
            f"{node.lineno} {node.attr}"
            for node in find(path, ast.Attribute)
            if node.attr in ("regexp_match", "regexp_replace")
        ]

    assert breaches(matches, ("common/store/regular_expressions.py",)) == []


def find_values_in_log(calls: Iterable[ast.Call]) -> list[str]:
    """Return a line for each log call with a value in the event text, or a reserved field name."""
    places = []
    for call in calls:
        if (
            not isinstance(call.func, ast.Attribute)
            or call.func.attr not in LOG_METHODS
            or last_name(call.func.value) not in LOGGERS
        ):
            continue
        arguments = call.args[1:] if call.func.attr == "log" else call.args
        has_constant_event = (
            len(arguments) == 1
            and isinstance(arguments[0], ast.Constant)
            and isinstance(arguments[0].value, str)
            and not re.search(r"%(\(|[-+#0-9.]*[a-z])", arguments[0].value)
        )
        if not has_constant_event or NO_FIELDS & {word.arg for word in call.keywords}:
            places.append(f"{call.lineno} {ast.unparse(call)[:100]}")
    return places


def test_log_calls_have_constant_event_and_fields() -> None:
    """Values are fields: ``log.info("a host joined", host=host)``. See ``common.service.log``."""
    assert breaches(lambda path: find_values_in_log(find(path, ast.Call)), VALUES_IN_LOG) == []


def find_calls(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def test_log_rule_finds_each_form_of_value_in_the_event() -> None:
    texts = [
        "log.info(f'host {host} joined')",
        "log.warning('host %s joined', host)",
        "LOG.error('host %s joined' % host)",
        "logger.exception('host %s joined')",
        "self._log.info(text)",
        "log.log(level, text, host=host)",
        "log.info('a host joined', host)",
        "log.info('a host joined', level=1)",
        "log.debug()",
    ]
    assert [text for text in texts if not find_values_in_log(find_calls(text))] == []
    for text in ("log.info('90 % joined', host=host)", "log.log(1, 'joined')", "math.log(2)"):
        assert find_values_in_log(find_calls(text)) == []


def test_sleeps_in_tests_have_a_comment() -> None:
    """The comment is on the line of the sleep or above it. Tests poll with ``tests.waiting``."""
    unexplained = []
    for path in sources("tests"):
        if "sleep(" not in path.read_text():
            continue
        sleeps = [
            node.lineno
            for node in find(path, ast.Call)
            if ast.unparse(node.func) in ("time.sleep", "sleep")
        ]
        with path.open("rb") as file:
            comments = {
                token.start[0]
                for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.COMMENT
            }
        unexplained += [
            f"{name_of(path)}:{line}" for line in sleeps if not {line, line - 1} & comments
        ]
    assert unexplained == []
