# SPDX-License-Identifier: Apache-2.0
"""Run functions and programs on files in locked-down helper processes.

``virt.libvirt.disks`` uses this. Each process has one fork server, which starts on the first
request, and again after a crash. Helpers run as a separate user if this process may change users.
While a helper works on a file that only its owner may open, that user owns the file.

Invariant: a helper ends when the requester closes its socket or dies. The crash of a helper is a
result like any other, and the request is not repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
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
from common.service.log import get_logger
from compute_agent.sandbox import landlock
from compute_agent.sandbox.lockdown import HelperLimits
from compute_agent.verb_context import Cancelled, VerbContext

log = get_logger(__name__)
#: Modules with the functions that helpers run.
MODULES = ("compute_agent.virt.libvirt.disks.inspector",)
#: Size of the end of a helper's output that is kept.
MAX_OUTPUT_BYTES = 64 << 10
LOOK_SECONDS = 0.5
#: CAP_CHOWN, CAP_KILL, CAP_SETGID and CAP_SETUID, which running helpers as another user requires.
NEEDED_CAPABILITIES = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7
#: Variables of this process's environment that helpers get.
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
#: Users for helpers. The first existing user is taken.
USERS = ("kilonova-images", "nobody")
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from compute_agent.sandbox import server; "
    "server.main(int(sys.argv[2]), sys.argv[3:])"
)


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Settings for all helpers.

    Attributes:
        user: The user as whom helpers run. "" means the first existing user of ``USERS``.
        memory: Limit of the address space in bytes.
        cpu: Seconds of processor time for quick functions.
    """

    user: str = ""
    memory: int = 1 << 30
    cpu: int = 30


@dataclass(frozen=True, slots=True)
class HelperResult:
    """The end of a helper.

    Attributes:
        status: Exit status. 0 means success. Negative values are signals, or -1 if the end is
            unknown.
        why: "time" if the helper took too long and was killed, "lost" if the end is unknown, else
            "".
        output: The end of the output.
        cpu: Seconds of processor time used.
        memory: Maximum of memory used, in bytes.
    """

    status: int
    why: str
    output: bytes
    cpu: float = 0.0
    memory: int = 0

    @property
    def reason(self) -> str:
        """The outcome and the last 1,000 bytes of the output, as a text for operators."""
        outcome = "took too long" if self.why == "time" else f"ended with {self.status}"
        return f"{outcome}: {self.output[-1000:].decode(errors='replace').strip()}".removesuffix(
            ": "
        )


class Helpers:
    """The helpers of this process, with their fork server. Thread-safe."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self.user = _choose_user(settings.user)

    def limits(self, *, cpu: int = 0, seconds: float = 120, file: int = 0) -> HelperLimits:
        """Return the limits for a helper. The limit of memory is that of the settings.

        Args:
            cpu: Seconds of processor time in addition to the configured seconds.
            seconds: Limit of the total time.
            file: Limit in bytes of each file that the helper writes. 0 forbids writing to files.
        """
        return HelperLimits(self.settings.memory, self.settings.cpu + cpu, seconds, file)

    def call(
        self,
        function: str,
        files: Sequence[int],
        limits: HelperLimits,
        context: VerbContext | None = None,
        **arguments: object,
    ) -> HelperResult:
        """Call a function in a helper, and return the end of the helper.

        Args:
            function: The function as ``module:name``, from a module of ``MODULES``. Its positional
                arguments are the numbers of the open files in the helper: 3, 4 and so on.
            files: Descriptors of the files in this process.
            limits: Limits of the helper.
            context: Context of the verb, whose cancellation ends the helper. None: no verb.
            arguments: Further arguments of the function by name, as JSON values.

        Returns:
            The result. If the status is 0, the output is the function's return value as JSON.

        Raises:
            Cancelled: The verb was cancelled.
            OSError: The fork server cannot be started.
        """
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
        """Run a program on files in a helper, and return the end of the helper.

        During the run the helpers' user owns the files that not all users may read, or that the
        program may write. If this process may not change the owner, the program runs as this
        process's user.

        Args:
            program: Path and arguments. The arguments name the files as ``name(0)``, ``name(1)``
                and so on.
            files: Path -> True if the program may write to the file.
            limits: Limits of the helper.
            context: Context of the verb, whose cancellation ends the helper. None: no verb.
            on_output: Called with each piece of the output.

        Raises:
            Cancelled: The verb was cancelled.
            OSError: A file cannot be opened, or the fork server cannot be started.
        """
        order = {"call": "", "program": list(program), "arguments": {}}
        with contextlib.ExitStack() as stack:
            descriptors = [
                stack.enter_context(_open_file(path, write)) for path, write in files.items()
            ]
            user = self.user
            ownership = stack.enter_context(contextlib.ExitStack())
            if user is not None and not all(
                ownership.enter_context(_lend_file(file, user[0])) for file in descriptors
            ):
                log.warning(
                    "the owner of files cannot be changed, so a helper program runs as this process's user",
                    path=next(iter(files)).parent,
                    program=program[0],
                )
                ownership.close()
                user = None
            if user is None:
                # The helper runs as this process's user without capabilities, and could not open
                # files of other users.
                for file in descriptors:
                    ownership.enter_context(_lend_file(file, os.geteuid()))
            return self._do(order, descriptors, user, limits, context, on_output)

    def _do(
        self,
        order: JsonObject,
        files: Sequence[int],
        user: tuple[int, int] | None,
        limits: HelperLimits,
        context: VerbContext | None,
        on_output: Callable[[bytes], None] | None = None,
    ) -> HelperResult:
        """Run a request and return the result. Repeat the request once if its result is "lost".

        A result is "lost" (``HelperResult.why``) if the process that watches the helper was killed.
        If the repetition is "lost" too, this is the result. Requests can be repeated without harm.

        Args:
            order: The function or program of the request, and its arguments, as JSON.
            files: Descriptors of the helper's files.
            user: (user id, group id) of the helper, or None for this process's user.
            limits: Limits of the helper.
            context: Context of the verb, or None.
            on_output: Called with each piece of the output, or None.

        Raises:
            Cancelled: The verb was cancelled.
            OSError: The fork server cannot be started.
        """
        for _ in range(2):
            result = self._try(order, files, user, limits, context, on_output)
            if result.why != "lost":
                break
        return result

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
        message = json.dumps(order).encode()
        with self._lock:
            for _ in range(2):
                orders = self._orders or self._start()
                try:
                    socket.send_fds(orders, [message], files)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    # The fork server was killed. The next attempt starts another.
                    self._end()
        raise OSError(
            errno.EPIPE,
            "the fork server of helpers ends as soon as it is started; see the agent's log",
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
        """End the fork server. Running helpers continue until they are done or time out.

        The next request starts another fork server.
        """
        with self._lock:
            self._end()


def name(number: int) -> str:
    """Return the path at which a program run by ``Helpers.execute`` opens one of its files.

    Args:
        number: Position of the file in the argument ``files``, counted from 0.
    """
    return f"/dev/fd/{3 + number}"


def _follow(
    requester: socket.socket,
    output: int,
    context: VerbContext | None,
    on_output: Callable[[bytes], None] | None,
) -> HelperResult:
    """Read the output of a helper until the helper has ended, and return the result.

    The result has the last ``MAX_OUTPUT_BYTES`` of the output. If no report comes, ``why`` is
    "lost".

    Args:
        requester: The socket to the watcher of the helper, which sends the report there. If this
            function raises, the caller must close the socket, which ends the helper.
        output: Descriptor of the pipe with the helper's output.
        context: Context of the verb, or None.
        on_output: Called with each piece of the output, or None.

    Raises:
        Cancelled: The verb was cancelled.
    """
    collected, waiting = bytearray(), {requester.fileno(), output}
    report: JsonObject = {"status": -1, "why": "lost", "cpu": 0.0, "memory": 0}
    while waiting:
        if context is not None and context.cancelled():
            raise Cancelled
        ready, _, _ = select.select(list(waiting), [], [], LOOK_SECONDS)
        if output in ready:
            piece = os.read(output, 1 << 16)
            collected = (collected + piece)[-MAX_OUTPUT_BYTES:]
            if not piece:
                waiting.discard(output)
            elif on_output is not None:
                on_output(piece)
        if requester.fileno() in ready:
            report = json.loads(requester.recv(4096) or json.dumps(report))
            waiting.discard(requester.fileno())
    return HelperResult(output=bytes(collected), **report)


@contextlib.contextmanager
def _open_file(path: Path, write: bool) -> Iterator[int]:
    file = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _lend_file(file: int, user: int) -> Iterator[bool]:
    """Make ``user`` the owner of an open file during the block, so that a program can open it.

    The owner of a file that all users may read, and that is open for reading only, does not change.
    A file that ``user`` owns already was lent by an agent that was killed. After the block, this
    process's user owns the file.

    Yields:
        False if this process may not change the owner. The owner is then unchanged.
    """
    status = os.fstat(file)
    if (
        fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        and status.st_mode & stat.S_IROTH
    ):
        yield True
        return
    # A file that still belongs to the helper's user was lent by an agent that was killed.
    owner = status.st_uid if status.st_uid != user else os.geteuid()
    try:
        if status.st_uid != user:
            os.fchown(file, user, -1)
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        if owner != user:
            os.fchown(file, owner, -1)


def _choose_user(user: str) -> tuple[int, int] | None:
    """Return (user id, group id) for helpers, or None if this process may not change its user.

    None is logged as a warning. Helpers then run as this process's user.

    Args:
        user: Name of the user. "" means the first existing user of ``USERS``.

    Raises:
        ValueError: The user does not exist.
    """
    entry = next(
        (candidate for candidate in map(_find_user, [user] if user else USERS) if candidate), None
    )
    if entry is None:
        raise ValueError(
            f"there is no user {user or ' or '.join(USERS)} for helper processes: create it, or set [agent] "
            "image_user"
        )
    if _capabilities() & NEEDED_CAPABILITIES != NEEDED_CAPABILITIES:
        log.warning(
            "this process may not change its user: helpers that read images run as the same user, without "
            "capabilities and network"
        )
        if not landlock.version():
            log.warning(
                "this kernel has no Landlock, so helpers that run programs can open the files of this process's user"
            )
        return None
    return entry.pw_uid, entry.pw_gid


def _find_user(user: str) -> pwd.struct_passwd | None:
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
    """Set the settings for the helpers of this process, and end the previous fork server.

    The new fork server starts with the first request.

    Raises:
        ValueError: The configured user does not exist. The previous settings stay.
    """
    global _helpers
    new_helpers = Helpers(settings)
    with _lock:
        if _helpers is not None:
            _helpers.close()
        _helpers = new_helpers


def helpers() -> Helpers:
    """Return the helpers of this process, with default settings if ``configure`` was not called.

    Raises:
        ValueError: With default settings: no user of ``USERS`` exists.
    """
    global _helpers
    with _lock:
        if _helpers is None:
            _helpers = Helpers(SandboxSettings())
        return _helpers


def take_back(path: Path) -> None:
    """Make this process's user the owner of a file again, if the helpers' user owns it.

    Such a file was lent to a helper by an agent that was killed. Other files are not changed.

    Raises:
        OSError: The file does not exist, or its owner cannot be changed. Not raised if
            the agent may not change users, because then no file is read or changed.
    """
    user = helpers().user
    if user is not None and path.stat().st_uid == user[0]:
        os.chown(path, os.geteuid(), -1)
