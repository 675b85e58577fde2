# SPDX-License-Identifier: Apache-2.0
"""Has things done to files by helper processes that may do nothing else.

Called by ``virt.libvirt.qemu_img`` and ``virt.libvirt.inspection``. One fork server a process,
started when it is first needed and again when it is gone. Helpers run as a user of their own where
the process may give them one; a file that only its owner may open is that user's while a helper
works on it. Must stay true: a helper does not outlive whoever asked; a helper that ends badly is a
definite answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import pwd
import select
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.domain.json_types import JsonObject
from compute_agent.sandbox import landlock
from compute_agent.sandbox.lockdown import HelperLimits
from compute_agent.verb_context import Cancelled, VerbContext

log = logging.getLogger(__name__)
#: Whose functions helpers run.
MODULES = ("compute_agent.virt.libvirt.disks.inspector",)
#: Of what a helper says, the end is kept.
MAX_OUTPUT_BYTES = 64 << 10
LOOK_SECONDS = 0.5
#: CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID: what it takes to give helpers a user of their own.
NEEDED_CAPABILITIES = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7
#: What helpers learn of this process's environment.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
#: Users for helpers, the first that there is.
USERS = ("kilonova-images", "nobody")
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from compute_agent.sandbox import server; "
    "server.main(int(sys.argv[2]), sys.argv[3:])"
)


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """user: whose rights helpers have; "": the first of ``USERS`` that there is. memory: their
    address space in bytes.
    cpu: seconds of processor time for what is quick."""

    user: str = ""
    memory: int = 1 << 30
    cpu: int = 30


@dataclass(frozen=True, slots=True)
class HelperResult:
    """status: 0 when all is well, negative: the signal. why: "time" when it took too long, "lost"
    when nobody knows.
    cpu: seconds used, memory: bytes at most."""

    status: int
    why: str
    output: bytes
    cpu: float = 0.0
    memory: int = 0

    @property
    def reason(self) -> str:
        """For operators: how it ended, and what it said."""
        how = "took too long" if self.why == "time" else f"ended with {self.status}"
        return f"{how}: {self.output[-1000:].decode(errors='replace').strip()}".removesuffix(": ")


class Helpers:
    """Starts helpers. Thread-safe."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self.user = _chosen(settings.user)

    def limits(self, *, cpu: int = 0, seconds: float = 120, file: int = 0) -> HelperLimits:
        """Those of a helper: ``cpu`` seconds of processor time beside what is configured,
        ``seconds`` in all."""
        return HelperLimits(self.settings.memory, self.settings.cpu + cpu, seconds, file)

    def call(
        self,
        function: str,
        files: Sequence[int],
        limits: HelperLimits,
        context: VerbContext | None = None,
        **arguments: object,
    ) -> HelperResult:
        """Have a function of ours, ``module:name``, called with these open files; its answer is
        JSON in the output. Raises Cancelled, OSError."""
        return self._do(
            {"call": function, "program": None, "arguments": arguments},
            files,
            self.user,
            limits,
            context,
        )

    def execute(
        self,
        program: Sequence[str],
        files: Mapping[Path, bool],
        limits: HelperLimits,
        context: VerbContext | None = None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> HelperResult:
        """Run a program on files, which it finds as ``name(0)``, ``name(1)`` …; True: it may write
        into that one.
        ``on_output`` is told what the program says. Raises Cancelled, OSError."""
        order = {"call": "", "program": list(program), "arguments": {}}
        with contextlib.ExitStack() as opened:
            lent = [opened.enter_context(_opened(path, write)) for path, write in files.items()]
            user = self.user
            lending = opened.enter_context(contextlib.ExitStack())
            if user is not None and not all(
                lending.enter_context(_chowned(file, user[0])) for file in lent
            ):
                log.warning(
                    "files of %s cannot change hands, so %s runs as this process's user",
                    next(iter(files)).parent,
                    program[0],
                )
                lending.close()
                user = None
            if user is None:
                # It is ours without our capabilities: another's file is closed to it.
                for file in lent:
                    lending.enter_context(_chowned(file, os.geteuid()))
            return self._do(order, lent, user, limits, context, on_output)

    def _do(
        self,
        order: JsonObject,
        files: Sequence[int],
        user: tuple[int, int] | None,
        limits: HelperLimits,
        context: VerbContext | None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> HelperResult:
        """What is asked for can be done twice: once more where whoever should have told how it
        ended was killed."""
        for _ in range(2):
            ended = self._try(order, files, user, limits, context, on_output)
            if ended.why != "lost":
                break
        return ended

    def _try(
        self,
        order: JsonObject,
        files: Sequence[int],
        user: tuple[int, int] | None,
        limits: HelperLimits,
        context: VerbContext | None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> HelperResult:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        with ours, open(reading, "rb", buffering=0) as output:
            try:
                self._send(
                    {**order, "user": user, "limits": dataclasses.asdict(limits)},
                    [theirs.fileno(), writing, *files],
                )
            finally:
                theirs.close()
                os.close(writing)
            return _follow(ours, output.fileno(), context, on_output)

    def _send(self, order: JsonObject, files: list[int]) -> None:
        said = json.dumps(order).encode()
        with self._lock:
            for _ in range(2):
                orders = self._orders or self._start()
                try:
                    socket.send_fds(orders, [said], files)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._end()  # it was killed
        raise OSError(
            errno.EPIPE, "the fork server of helpers ends as soon as it is started; see this log"
        )

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _START,
                    json.dumps(sys.path),
                    str(theirs.fileno()),
                    *MODULES,
                ],
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._orders = ours
        return ours

    def _end(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._server is not None:
            self._server.wait()
        self._orders = self._server = None

    def close(self) -> None:
        """End the fork server; helpers at work end by themselves."""
        with self._lock:
            self._end()


def name(number: int) -> str:
    """The path at which a program finds its file of this number."""
    return f"/dev/fd/{3 + number}"


def _follow(
    requester: socket.socket,
    output: int,
    context: VerbContext | None,
    on_output: Callable[[bytes], None] | None,
) -> HelperResult:
    """Until it has ended; whoever leaves before closes ``requester``, by which the helper ends."""
    said, waiting = bytearray(), {requester.fileno(), output}
    report: JsonObject = {"status": -1, "why": "lost", "cpu": 0.0, "memory": 0}
    while waiting:
        if context is not None and context.cancelled():
            raise Cancelled
        ready, _, _ = select.select(list(waiting), [], [], LOOK_SECONDS)
        if output in ready:
            piece = os.read(output, 1 << 16)
            said = (said + piece)[-MAX_OUTPUT_BYTES:]
            if not piece:
                waiting.discard(output)
            elif on_output is not None:
                on_output(piece)
        if requester.fileno() in ready:
            report = json.loads(requester.recv(4096) or json.dumps(report))
            waiting.discard(requester.fileno())
    return HelperResult(output=bytes(said), **report)


@contextlib.contextmanager
def _opened(path: Path, write: bool) -> Iterator[int]:
    file = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _chowned(file: int, user: int) -> Iterator[bool]:
    """The file, which a program opens by another name, is this user's meanwhile, unless all may
    read it and nobody writes. False: it cannot be."""
    about = os.fstat(file)
    if (
        fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        and about.st_mode & stat.S_IROTH
    ):
        yield True
        return
    # it may be lent since an agent died
    owner = about.st_uid if about.st_uid != user else os.geteuid()
    try:
        if about.st_uid != user:
            os.fchown(file, user, -1)
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        if owner != user:
            os.fchown(file, owner, -1)


def _chosen(user: str) -> tuple[int, int] | None:
    """(user, group) for helpers; None when they stay who this process is. Raises ValueError."""
    found = next((one for one in map(_known, [user] if user else USERS) if one), None)
    if found is None:
        raise ValueError(f"there is no user {user or ' or '.join(USERS)}")
    if _capabilities() & NEEDED_CAPABILITIES != NEEDED_CAPABILITIES:
        log.warning(
            "this process may not change its user: helpers that read images run as its own, without "
            "capabilities and network%s",
            ""
            if landlock.version()
            else "; this kernel has no Landlock, which would keep them from the files of that user",
        )
        return None
    return found.pw_uid, found.pw_gid


def _known(user: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        return None


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("CapEff:")[1].split()[0], 16)


_helpers: Helpers | None = None
_lock = threading.Lock()


def configure(settings: SandboxSettings) -> None:
    """What helpers of this process are allowed from now on. Raises ValueError."""
    global _helpers
    made = Helpers(settings)
    with _lock:
        if _helpers is not None:
            _helpers.close()
        _helpers = made


def helpers() -> Helpers:
    """Those of this process."""
    global _helpers
    with _lock:
        if _helpers is None:
            _helpers = Helpers(SandboxSettings())
        return _helpers


def take_back(path: Path) -> None:
    """A file that a process which died had lent is ours again. Raises OSError."""
    user = helpers().user
    if user is not None and path.stat().st_uid == user[0]:
        os.chown(path, os.geteuid(), -1)
