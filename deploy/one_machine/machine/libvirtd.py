# SPDX-License-Identifier: Apache-2.0
"""A libvirtd of our own, apart from any other on the machine.

deploy/up, the lab and the tests use this module. ``start(state_dir)`` returns the URI to connect
to, and ``stop`` ends libvirtd and the guests.

libvirtd's folders are fixed at compile time, so libvirtd runs in a mount namespace in which they
are folders of ``state_dir``. The first process of a PID namespace reaps children (libvirt waits for
QEMU to vanish) and restarts daemons that die. Guests run as Debian's user for QEMU. libvirt makes
this user the owner of a guest's files.

``serve`` can also make another host of this machine, with a network namespace for the guests'
devices, a host name, and an address for live migrations. libvirtd itself only listens on a socket
file. ``state_dir`` must be short, because the sockets are there.

Invariant: outside ``state_dir`` only missing folders to mount on are made, no process survives
``stop``, no guest runs as root, and no libvirtd is reachable from other machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import grp
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

#: libvirt's folder -> our folder below the state folder.
FOLDERS = {
    "/run/libvirt": "run",
    "/var/lib/libvirt": "lib",
    "/etc/libvirt": "etc",
    "/var/log/libvirt": "log",
    "/var/cache/libvirt": "cache",
}
#: The daemons. virtlogd keeps the guests' console logs from filling the disk.
DAEMONS = ("virtlogd", "libvirtd")
PACKAGES = (
    "libvirt-daemon libvirt-daemon-driver-qemu libvirt-daemon-system qemu-system-x86 qemu-utils"
)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x20000000,
    0x40000000,
)
PR_SET_PDEATHSIG = 1
#: Stands for the present network namespace. /sys already shows the devices there.
HERE = Path("/proc/self/ns/net")
#: The user of guests, from Debian's package libvirt-daemon-system.
QEMU_USER, QEMU_GROUP = "libvirt-qemu", "kvm"
KVM = Path("/dev/kvm")
LONGEST_STATE_DIR, PAUSE_BEFORE_RESTART = 80, 0.5


class Failed(Exception):
    """libvirtd cannot be started or stopped. The text contains advice."""


def uri(state_dir: str | Path) -> str:
    """Return the URI for a connection to the libvirtd of this folder."""
    return f"qemu+unix:///system?socket={_socket(Path(state_dir))}"


def start(
    state_dir: str | Path,
    seconds: float = 30,
    *,
    host: tuple[Path, str] | None = None,
    address: str = "",
    certificates: str = "",
) -> str:
    """Start libvirtd unless it runs, wait until connections are accepted, and return the URI.

    For a running libvirtd the last three arguments are ignored.

    Args:
        state_dir: The folder of this libvirtd.
        seconds: How long to wait.
        host: As for ``serve``.
        address: As for ``serve``. Ignored without ``host``.
        certificates: As for ``serve``. Ignored without ``host``.

    Raises:
        Failed: A program or user is missing, the path is too long, or libvirtd does not answer.
    """
    folder = Path(state_dir).resolve()
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon, path=_path()) is None]
    if missing:
        raise Failed(f"the programs {', '.join(missing)} are missing: install {PACKAGES}")
    try:
        pwd.getpwnam(QEMU_USER)
    except KeyError as problem:
        raise Failed(f"there is no user {QEMU_USER} for guests: install {PACKAGES}") from problem
    if len(str(folder)) > LONGEST_STATE_DIR:
        raise Failed(
            f"the path {folder} is too long for the sockets there: use a path of at most {LONGEST_STATE_DIR} letters"
        )
    serving = (
        None if is_running(folder) else _serve_in_background(folder, host, [address, certificates])
    )
    deadline = time.monotonic() + seconds
    while not _accepts_connections(folder):
        if time.monotonic() > deadline or (serving and serving.poll() is not None):
            last_line = (
                (folder / "libvirtd.out").read_text(errors="replace").strip().splitlines()[-1:]
            )
            raise Failed(
                f"libvirtd does not answer: see {folder}/libvirtd.out, which ends with {last_line}, and "
                f"{folder}/log; libvirtd needs the right to make namespaces (root; in a container --privileged)"
            )
        time.sleep(0.05)
    return uri(folder)


def _serve_in_background(
    folder: Path, host: tuple[Path, str] | None, reached: list[str]
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    where = [str(host[0]), host[1], *filter(None, reached)] if host else []
    with (folder / "libvirtd.out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, __file__, "serve", str(folder), *where],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def stop(state_dir: str | Path, seconds: float = 30) -> None:
    """End libvirtd and the guests, with SIGKILL after this many seconds.

    A stopped libvirtd is no error.

    Raises:
        Failed: libvirtd still runs 5 seconds later.
    """
    folder = Path(state_dir).resolve()
    deadline, pid = time.monotonic() + seconds, 0
    # The process releases the lock a moment before the end.
    while is_running(folder) or _is_serving(pid):
        left = deadline - time.monotonic()
        if left < -5:
            raise Failed(
                f"libvirtd of {folder} does not end: kill the process whose id is in {folder}/lock"
            )
        pid = int((folder / "lock").read_text().strip() or 0)
        if is_running(folder) and _is_serving(pid):
            _signal(pid, signal.SIGTERM if left > 0 else signal.SIGKILL)
        time.sleep(0.05)


def is_running(state_dir: str | Path) -> bool:
    """Return True if a process serves this folder. Such a process holds the lock."""
    try:
        with (Path(state_dir) / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def serve(
    state_dir: Path, host: tuple[Path, str] | None = None, address: str = "", certificates: str = ""
) -> int:
    """Run libvirtd in the foreground and return the status of the first process.

    SIGTERM ends libvirtd and the guests.

    Args:
        state_dir: The folder of this libvirtd.
        host: The file of the network namespace and the host name, or None for the machine's own.
        address: The address at which QEMU receives live migrations.
        certificates: A folder with certificates under QEMU's names. QEMU then only accepts peers
            with a certificate of the same authority.

    Raises:
        Failed: A namespace cannot be made or entered.
        BlockingIOError: Another process serves this folder.
    """
    with (state_dir / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        configure(state_dir, address, certificates)
        if host is not None:
            _enter_host(*host)
        _unshare(CLONE_NEWNS | CLONE_NEWPID)
        child = os.fork()
        if child == 0:
            os._exit(
                _run_first_process(state_dir, own_network=host is not None and host[0] != HERE)
            )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, frame: os.kill(child, signal.SIGTERM))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def configure(state_dir: Path, address: str = "", certificates: str = "") -> None:
    """Create libvirtd's folders, and add missing settings to the configuration files.

    A present setting stays, because an operator may have changed it. It also stays if ``address``
    or ``certificates`` differ from an earlier call.

    Args:
        state_dir: The folder of this libvirtd.
        address: As for ``serve``.
        certificates: As for ``serve``.
    """
    for own_folder in FOLDERS.values():
        (state_dir / own_folder).mkdir(parents=True, exist_ok=True)
        # Guests use files and sockets below this folder. They need not list the files of other
        # guests.
        (state_dir / own_folder).chmod(0o711)
    files: dict[str, dict[str, object]] = {
        "libvirtd.conf": {
            "auth_unix_rw": "none",
            "unix_sock_rw_perms": "0700",
            "unix_sock_ro_perms": "0700",
            "host_uuid": str(uuid.uuid4()),
        },
        "qemu.conf": {
            "user": QEMU_USER,
            "group": QEMU_GROUP,
            "dynamic_ownership": 1,
            "seccomp_sandbox": 1,
            "security_driver": "none",
            "namespaces": [],
            "cgroup_controllers": [],
            "remember_owner": 0,
            "stdio_handler": "logd",
        },
    }
    if address:
        files["qemu.conf"] |= {"migration_address": address, "migration_host": address}
    if certificates:
        files["qemu.conf"] |= {
            "migrate_tls_x509_cert_dir": certificates,
            "migrate_tls_x509_verify": 1,
            "nbd_tls_x509_cert_dir": certificates,
        }
    for name, settings in files.items():
        path = state_dir / "etc" / name
        before = path.read_text() if path.exists() else ""
        present_keys = {line.split("=")[0].strip() for line in before.splitlines()}
        missing = [
            f"{key} = {json.dumps(value)}\n"
            for key, value in settings.items()
            if key not in present_keys
        ]
        if missing:
            path.write_text(before + "".join(missing))


def _run_first_process(state_dir: Path, own_network: bool = False) -> int:
    """Mount the folders, start the daemons, and reap processes until SIGTERM or SIGINT.

    A daemon that dies is started again. The result is 0.

    Args:
        state_dir: The folder of this libvirtd.
        own_network: True in a network namespace of the host's own, for which /sys is mounted again.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    if own_network:
        # /sys shows the devices of the network namespace that mounted it.
        _mount("-t", "sysfs", "sysfs", "/sys")
    for libvirt_folder, own_folder in FOLDERS.items():
        Path(libvirt_folder).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(state_dir / own_folder), libvirt_folder)
    _give_kvm(state_dir / "kvm")
    for stale in (state_dir / "run").glob("*.pid"):
        stale.unlink()
    waited = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    daemons = {_spawn(daemon): daemon for daemon in DAEMONS}
    while signal.sigwait(waited) == signal.SIGCHLD:
        while dead := os.waitpid(-1, os.WNOHANG)[0]:
            if dead in daemons:
                time.sleep(PAUSE_BEFORE_RESTART)
                daemon = daemons.pop(dead)
                daemons[_spawn(daemon)] = daemon
    return 0


def _give_kvm(node: Path) -> None:
    """Mount a /dev/kvm that the guests' group may open, unless the group may open the machine's.

    A machine without /dev/kvm gets none.

    Args:
        node: The path of the new device file.
    """
    group = grp.getgrnam(QEMU_GROUP).gr_gid
    if not KVM.exists() or _can_open(KVM.stat(), group):
        return
    node.unlink(missing_ok=True)
    os.mknod(node, stat.S_IFCHR | 0o600, KVM.stat().st_rdev)
    os.chown(node, 0, group)
    node.chmod(0o660)
    _mount("--bind", str(node), str(KVM))


def _can_open(about: os.stat_result, group: int) -> bool:
    return about.st_mode & 0o006 == 0o006 or (
        about.st_gid == group and about.st_mode & 0o060 == 0o060
    )


def _spawn(daemon: str) -> int:
    path = shutil.which(daemon, path=_path())
    assert path is not None, "start() has looked for it"
    # Without the option the pid file would be in /run itself, where another libvirtd may use the
    # file.
    command = [path, "--pid-file", f"/run/libvirt/{daemon}.pid"]
    return os.posix_spawn(path, command, os.environ, setsid=True, setsigmask=[])


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise Failed(
            f"namespaces cannot be made: {os.strerror(ctypes.get_errno())}; run as root (in a container: --privileged)"
        )


def _enter_host(network: Path, name: str) -> None:
    try:
        with network.open("rb") as file:
            left = ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET)
    except FileNotFoundError as problem:
        raise Failed(f"there is no network namespace {network}: run ./deploy/up again") from problem
    if left != 0:
        raise Failed(
            f"the network namespace {network} cannot be entered: {os.strerror(ctypes.get_errno())}; run as root"
        )
    _unshare(CLONE_NEWUTS)
    socket.sethostname(name)


def _is_serving(pid: int) -> bool:
    """Return True if the command line of the process with this id contains libvirtd.

    Why: ids are recycled.
    """
    try:
        return b"libvirtd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _socket(state_dir: Path) -> Path:
    return state_dir.resolve() / "run" / "libvirt-sock"


def _accepts_connections(state_dir: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(_socket(state_dir)))
        except OSError:
            return False
    return True


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def main(arguments: list[str]) -> int:
    """Run the command, and return the exit status. Wrong arguments print the usage and return 2.

    Raises:
        Failed: libvirtd does not start or stop, or a namespace cannot be made or entered.
        BlockingIOError: The command is serve, and another process serves this folder.
    """
    match arguments:
        case ["start", folder]:
            print(start(folder))
        case ["stop", folder]:
            stop(folder)
        case ["serve", folder]:
            return serve(Path(folder).resolve())
        case ["serve", folder, network, name, *reached] if len(reached) < 3:
            return serve(Path(folder).resolve(), (Path(network), name), *reached)
        case _:
            print(
                "usage: libvirtd start|stop|serve STATE_DIR [NETWORK_NAMESPACE_FILE HOST [ADDRESS [CERTIFICATES]]]",
                file=sys.stderr,
            )
            return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Failed as failure:
        sys.exit(str(failure))
