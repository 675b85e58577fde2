# SPDX-License-Identifier: Apache-2.0
"""A Debian 12 of its own that is booted: systemd runs in it, and packages come from the mirrors of
this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.packages import ROOT
from deploy.progress import run
from tests.waiting import await_true

#: An archive of an empty Debian, which is made once.
BASE = ROOT / "build/install/debian.tar"
INCLUDED = "systemd-sysv,dbus,init-system-helpers,ca-certificates"
MIRROR = "http://deb.debian.org/debian"
ADVICE = "Check the network and the proxy, then run this again."
NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--cgroup")
#: Seconds: a boot; packages that are downloaded and unpacked on two processors.
BOOT, INSTALL = 120, 1800
#: What systemd says once it has started everything, whether all of it could be or not.
STARTED = ("running", "degraded")


class Machine:
    """One of them, by its folder and the process that is its PID 1."""

    def __init__(self, folder: Path, init: int) -> None:
        self.folder, self._init = folder, init

    def run(self, *command: str, check: bool = True) -> str:
        """What a command in it prints.

        Raises:
            AssertionError: it failed, and was not allowed to.
        """
        done = subprocess.run(
            ["nsenter", f"--target={self._init}", *NAMESPACES, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL,
            check=False,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "DEBIAN_FRONTEND": "noninteractive",
                "LC_ALL": "C.UTF-8",
            },
        )
        assert not check or done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    def apt(self, *arguments: str) -> str:
        """apt-get, which asks nothing and keeps what an operator has written."""
        return self.run(
            *("apt-get", "--quiet", "--yes", "--no-install-recommends"),
            *("-o", "Dpkg::Options::=--force-confold", *arguments),
        )


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Boot one in a folder, and end it."""
    if not BASE.exists():
        BASE.parent.mkdir(parents=True, exist_ok=True)
        part = BASE.with_name("new.tar")
        make = [
            "mmdebstrap",
            "--variant=minbase",
            f"--include={INCLUDED}",
            "bookworm",
            part,
            MIRROR,
        ]
        run(make, ADVICE)
        part.rename(BASE)
    run(["tar", "-C", folder, "-xf", BASE], "Make room on the disk.")
    shutil.copyfile("/etc/resolv.conf", folder / "etc/resolv.conf")
    booted = subprocess.Popen(
        [
            *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit"),
            *("--resolv-conf=off", "--private-users=no", "--console=pipe"),
            *(f"--directory={folder}", f"--machine=kilonova-install-{os.getpid()}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield await_true(lambda: _up(folder, booted.pid), BOOT, "a booted Debian", pause=0.5)
    finally:
        for init in _children(booted.pid):
            os.kill(init, signal.SIGRTMIN + 4)  # systemd's word for: power off
        _end(booted)


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def _up(folder: Path, pid: int) -> Machine | None:
    """The machine, once everything in it has started."""
    for init in _children(pid):
        one = Machine(folder, init)
        if one.run("systemctl", "is-system-running", check=False).strip() in STARTED:
            return one
    return None


def _end(booted: subprocess.Popen[bytes]) -> None:
    try:
        booted.wait(BOOT)
    except subprocess.TimeoutExpired:
        booted.kill()
        booted.wait()
