# SPDX-License-Identifier: Apache-2.0
"""Running dnsmasq, one a network: started, adopted from an earlier run, told of changes, ended.

dnsmasq is a daemon of its own that outlives us: a host part that stops or dies takes no addresses from guests. Its
files are below the runtime folder; the name of the configuration holds its hash, so that the command line of a
running one says what it was started with. Must stay true: an address that belongs to a port now is given to that
port's MAC at its first request, whoever had it before; a port that is no more has no lease. What is wrong is read
from dnsmasq's own file each time, so that nothing has to be remembered over a kill.
"""
from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path

from deploy.standalone.network.host.dnsmasq import Dnsmasq
from deploy.standalone.network.host.kernel import SPACES, Failed, Kernel
from deploy.standalone.network.host.leases import SERVER_PORT, Lease, moved, release, stale
from deploy.standalone.network.host.names import Names

LOG = logging.getLogger("network.host")
LONGEST_STOP, LONGEST_RELEASE, WRITTEN = 5.0, 5.0, 0.1      # seconds
DEVICE = "dhcp"


class Servers:
    """All dnsmasq of one host part."""

    def __init__(self, kernel: Kernel, names: Names) -> None:
        self._kernel, self._names, self._folder = kernel, names, names.runtime
        self._told: dict[str, tuple[str, str, str]] = {}

    def ensure(self, space: str, wanted: Dnsmasq) -> list[str]:
        """What had to be done so that it runs and knows all ports. Raises Failed, OSError."""
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o755)
        state = (wanted.hosts, wanted.names, wanted.options)
        pid = self._running(wanted.network, wanted.version, space)
        old = self._stale(wanted)
        if pid is not None and not old and self._told.get(wanted.network) == state:
            return []
        if pid is not None and all(one.mac for one in old):
            self._write_all(wanted.network, state)
            os.kill(pid, signal.SIGHUP)
            self._told[wanted.network] = state
            if not old or self._release(space, wanted, old):
                return [f"dnsmasq of {wanted.network} reads {len(wanted.reserved)} reservations, "
                        f"{len(old)} leases taken back"]
        self.stop(wanted.network)
        self._strike(wanted)       # before the files: the old ones say who had an address of IPv6
        self._write_all(wanted.network, state)
        config = self._path(wanted.network, f"{wanted.version}.conf")
        self._write(config, wanted.fixed)
        self._kernel.run("dnsmasq", f"--conf-file={config}", f"--pid-file={self._path(wanted.network, 'pid')}",
                         f"--dhcp-leasefile={self._path(wanted.network, 'leases')}",
                         f"--dhcp-hostsfile={self._path(wanted.network, 'hosts')}",
                         f"--addn-hosts={self._path(wanted.network, 'names')}",
                         f"--dhcp-optsfile={self._path(wanted.network, 'options')}",
                         f"--log-facility={self._path(wanted.network, 'log')}", space=space)
        self._told[wanted.network] = state
        return [f"dnsmasq of {wanted.network} started"]

    def networks(self) -> set[str]:
        """Those that have files here."""
        return {path.name.split(".")[0] for path in self._folder.glob("*.*")} if self._folder.is_dir() else set()

    def remove(self, network: str) -> None:
        """End it and delete its files. Raises Failed."""
        self.stop(network)
        self._told.pop(network, None)
        for path in self._folder.glob(f"{network}.*"):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all, and the folder."""
        for network in self.networks() | set(self._processes()):
            self.remove(network)
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, network: str) -> None:
        """End the process, even one whose files were lost. Raises Failed when it does not."""
        pid = self._processes().get(network)
        deadline = time.monotonic() + LONGEST_STOP
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        while pid is not None and self._is_of(pid, network):
            if time.monotonic() > deadline:
                raise Failed(f"dnsmasq {pid} of network {network} does not end")
            time.sleep(0.002)

    def _pid(self, network: str) -> int | None:
        """Of the process that runs, checked: numbers are used again."""
        try:
            pid = int(self._path(network, "pid").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if self._is_of(pid, network) else None

    def _is_of(self, pid: int, network: str) -> bool:
        return f"--pid-file={self._path(network, 'pid')}".encode() in _words(pid)

    def _processes(self) -> dict[str, int]:
        """All that run, network -> pid, found without their files."""
        start = f"--pid-file={self._folder}/".encode()
        found = {word[len(start):].decode(): int(path.name) for path in Path("/proc").glob("[0-9]*")
                 for word in _words(int(path.name)) if word.startswith(start)}
        return {name.removesuffix(".pid"): pid for name, pid in found.items()}

    def _running(self, network: str, version: str, space: str) -> int | None:
        """Its pid when it was started with this configuration and is in the namespace that has the name now."""
        pid = self._pid(network)
        if pid is None:
            return None
        try:
            there = os.stat(f"/proc/{pid}/ns/net").st_ino
        except (FileNotFoundError, ProcessLookupError):
            return None
        config = f"--conf-file={self._path(network, f'{version}.conf')}"
        return pid if config.encode() in _words(pid) and there == os.stat(SPACES / space).st_ino else None

    def _text(self, network: str, kind: str) -> str:
        try:
            return self._path(network, kind).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _stale(self, wanted: Dnsmasq) -> list[Lease]:
        owners = dict(wanted.reserved)
        return stale(self._leases(wanted.network), owners, moved(self._text(wanted.network, "hosts"), owners))

    def _leases(self, network: str) -> list[str]:
        """The file as a whole: dnsmasq empties it to write it anew, so one without an end is read when it is older."""
        path = self._path(network, "leases")
        while True:
            text = self._text(network, "leases")
            is_fresh = path.exists() and 0 <= time.time() - path.stat().st_mtime < WRITTEN
            if text.endswith("\n") or not is_fresh:
                return text.splitlines()
            time.sleep(0.002)

    def _release(self, space: str, wanted: Dnsmasq, old: list[Lease]) -> bool:
        """Whether dnsmasq forgot these leases, and its file with it. Raises OSError."""
        self._kernel.send(space, DEVICE, [(release(one, own), (str(own), SERVER_PORT))
                                          for one in old for own in wanted.own])
        deadline = time.monotonic() + LONGEST_RELEASE
        while left := self._stale(wanted):
            if time.monotonic() > deadline:
                LOG.warning("dnsmasq of %s does not forget %s", wanted.network, ", ".join(one.address for one in left))
                return False
            time.sleep(0.002)
        return True

    def _strike(self, wanted: Dnsmasq) -> None:
        old = {one.line for one in self._stale(wanted)}
        kept = [f"{line}\n" for line in self._leases(wanted.network) if line not in old]
        self._write(self._path(wanted.network, "leases"), "".join(kept))

    def _write_all(self, network: str, state: tuple[str, str, str]) -> None:
        for kind, text in zip(("hosts", "names", "options"), state, strict=True):
            self._write(self._path(network, kind), text)

    def _path(self, network: str, kind: str) -> Path:
        return self._folder / f"{network}.{kind}"

    def _write(self, path: Path, text: str) -> None:
        part = path.with_name(f"{path.name}.new")
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)


def _words(pid: int) -> list[bytes]:
    """A process's command line; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
