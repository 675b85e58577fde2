# SPDX-License-Identifier: Apache-2.0
"""A libvirtd of our own, apart from any other on the machine.

Called by deploy/up, by the lab and by the tests: ``start(state_dir)`` returns the URI to connect
to, ``stop`` ends it and the guests it runs. libvirtd's folders are fixed when it is compiled, so it
gets a mount namespace in which they are folders of ``state_dir``; and a PID namespace whose first
process reaps the dead (libvirt waits for QEMU to vanish) and starts a daemon that died again.
Guests run as the user that Debian makes for QEMU, and libvirt hands their files to it. ``serve``
may also make it another host of this machine: with a network namespace, in which the guests'
devices then appear, and a name; and give it an address at which its QEMUs take in guests that move
while they run. libvirtd itself listens on its socket alone.
``state_dir`` must be short: sockets live below it. Must stay true: nothing outside ``state_dir`` is
written, no process survives ``stop``, no guest's process is root's, and no libvirtd is reached from
elsewhere.
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

#: libvirt's own folder -> ours, below the state folder.
FOLDERS = {
    "/run/libvirt": "run",
    "/var/lib/libvirt": "lib",
    "/etc/libvirt": "etc",
    "/var/log/libvirt": "log",
    "/var/cache/libvirt": "cache",
}
#: What it takes to be started; virtlogd keeps the guests' console logs from filling the disk.
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
#: Instead of the file of a namespace: the one that we are in, with the devices that /sys shows
#: already.
HERE = Path("/proc/self/ns/net")
#: Who guests run as: Debian's package libvirt-daemon-system makes the user.
QEMU_USER, QEMU_GROUP = "libvirt-qemu", "kvm"
KVM = Path("/dev/kvm")
LONGEST_STATE_DIR, PAUSE_BEFORE_RESTART = 80, 0.5


class Failed(Exception):
    """libvirtd could not be started or stopped; the text says what to do next."""


def uri(state_dir: str | Path) -> str:
    """Where to connect to the libvirtd of this folder."""
    return f"qemu+unix:///system?socket={_socket(Path(state_dir))}"


def start(
    state_dir: str | Path,
    seconds: float = 30,
    *,
    host: tuple[Path, str] | None = None,
    address: str = "",
    certificates: str = "",
) -> str:
    """Start libvirtd unless it runs, wait until it accepts connections, and return its URI.
    ``host``, ``address`` and ``certificates`` are as ``serve`` has them. Raises Failed."""
    folder = Path(state_dir).resolve()
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon, path=_path()) is None]
    if missing:
        raise Failed(f"{', '.join(missing)} not found: install {PACKAGES}")
    try:
        pwd.getpwnam(QEMU_USER)
    except KeyError as problem:
        raise Failed(f"there is no user {QEMU_USER} for guests: install {PACKAGES}") from problem
    if len(str(folder)) > LONGEST_STATE_DIR:
        raise Failed(
            f"{folder} is too long for socket paths: take a folder of at most {LONGEST_STATE_DIR} letters"
        )
    serving = (
        None if is_running(folder) else _serve_in_background(folder, host, [address, certificates])
    )
    deadline = time.monotonic() + seconds
    while not _accepts_connections(folder):
        if time.monotonic() > deadline or (serving and serving.poll() is not None):
            said = (folder / "libvirtd.out").read_text(errors="replace").strip().splitlines()[-1:]
            raise Failed(
                f"libvirtd does not answer: see {folder}/libvirtd.out, which ends with {said}, and "
                f"{folder}/log. It needs the right to make namespaces (root; in a container --privileged)"
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
    """End libvirtd and every guest it runs; harmless when it does not run. Raises Failed."""
    folder = Path(state_dir).resolve()
    deadline, pid = time.monotonic() + seconds, 0
    # Who served gives up the lock a moment before it ends.
    while is_running(folder) or _is_serving(pid):
        left = deadline - time.monotonic()
        if left < -5:
            raise Failed(f"libvirtd below {folder} does not end: its process is in {folder}/lock")
        pid = int((folder / "lock").read_text().strip() or 0)
        if is_running(folder) and _is_serving(pid):
            _signal(pid, signal.SIGTERM if left > 0 else signal.SIGKILL)
        time.sleep(0.05)


def is_running(state_dir: str | Path) -> bool:
    """Whether a process serves this folder: it holds the lock for as long as it lives."""
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
    """Stay in the foreground as long as libvirtd runs. SIGTERM ends it with its guests. ``host``:
    the file of the network namespace to run in, and the name of the host that it is there.
    ``address``: where QEMU takes in guests that come from other hosts while they run. With a folder
    of ``certificates`` (in QEMU's names) it speaks with nobody who cannot show one of the same
    authority."""
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
    """Write the settings that the configuration does not have yet; an operator's changes to it
    stay, but none that let libvirtd listen."""
    for ours in FOLDERS.values():
        (state_dir / ours).mkdir(parents=True, exist_ok=True)
        # Guests' processes have files and sockets of their own below; they need not list their
        # neighbours'.
        (state_dir / ours).chmod(0o711)
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
        known = {line.split("=")[0].strip() for line in before.splitlines()}
        missing = [
            f"{key} = {json.dumps(value)}\n" for key, value in settings.items() if key not in known
        ]
        if missing:
            path.write_text(before + "".join(missing))


def _run_first_process(state_dir: Path, own_network: bool = False) -> int:
    """Process 1 of the namespace: mounts, daemons, and reaping until told to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    if own_network:
        # it shows the devices of the namespace that mounted it
        _mount("-t", "sysfs", "sysfs", "/sys")
    for theirs, ours in FOLDERS.items():
        Path(theirs).mkdir(parents=True, exist_ok=True)
        _mount("--bind", str(state_dir / ours), theirs)
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
    """Where /dev/kvm is root's alone, as in many containers, guests get one of their own that their
    group may open."""
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
    # Without the option the pid file would be in /run itself, where another libvirtd may hold it.
    command = [path, "--pid-file", f"/run/libvirt/{daemon}.pid"]
    return os.posix_spawn(path, command, os.environ, setsid=True, setsigmask=[])


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise Failed(
            f"no namespaces: {os.strerror(ctypes.get_errno())}; run as root (in a container: --privileged)"
        )


def _enter_host(network: Path, name: str) -> None:
    try:
        with network.open("rb") as file:
            left = ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET)
    except FileNotFoundError as problem:
        raise Failed(f"there is no network namespace {network}: run ./deploy/up again") from problem
    if left != 0:
        raise Failed(f"{network} cannot be entered: {os.strerror(ctypes.get_errno())}; run as root")
    _unshare(CLONE_NEWUTS)
    socket.sethostname(name)


def _is_serving(pid: int) -> bool:
    """Whether the number is still that of a process that serves, and not a recycled one."""
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
