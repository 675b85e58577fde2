# SPDX-License-Identifier: Apache-2.0
"""The processes of dnsmasq, one a network: started, adopted from an earlier run, reloaded, ended.

dnsmasq is a daemon of its own that outlives the host part: one that stops or dies takes no
addresses from guests. Its files are below the runtime folder; the name of the configuration holds
its hash and the namespace, so that the command line of a running one says what it was started with,
and where. Must stay true: an address that belongs to a port now is given to that port's MAC at its
first request, whoever had it before; a port that is no more has no lease. dnsmasq keeps a lease
until it runs out, whatever its reservations say: one of IPv4 is given back in the guest's place
(dhcp_release), one of IPv6, which names no MAC, is struck from the file, and dnsmasq started anew.
What is stale is read from dnsmasq's own file each time, so that nothing has to be remembered over a
kill.
"""

import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.one_machine.services.network.host.dnsmasq_config import DnsmasqConfig
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError
from deploy.one_machine.services.network.host.names import Names

LOG = logging.getLogger("network.host")
STOP_TIMEOUT_SECONDS, RELEASE_TIMEOUT_SECONDS, REWRITE_SECONDS = 5.0, 5.0, 0.1
DEVICE = "dhcp"
#: dnsmasq's option -> what the file's name ends with
FILES = {
    "pid-file": "pid",
    "dhcp-leasefile": "leases",
    "dhcp-hostsfile": "hosts",
    "addn-hosts": "names",
    "dhcp-optsfile": "options",
    "log-facility": "log",
}
#: expiry, MAC (or the client's number of IPv6), address, name, the client's id
LEASE = re.compile(r"\d+ (\S+) ([0-9a-f.:]+) \S+ (\S+)")


@dataclass(frozen=True, slots=True)
class DhcpLease:
    """One line of dnsmasq's file."""

    line: str
    address: str
    mac: str  # with the type of the device before a "-" where that is not Ethernet; "" for IPv6
    client_id: str


class DnsmasqProcesses:
    """All dnsmasq of one host part."""

    def __init__(self, kernel: Kernel, names: Names) -> None:
        self._kernel, self._names, self._folder = kernel, names, names.runtime
        self._loaded: dict[str, tuple[str, str, str]] = {}  # network -> the files that it has read

    def ensure(self, namespace: str, wanted: DnsmasqConfig) -> None:
        """Let it run and know all ports. Raises KernelError, OSError."""
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o755)
        network, files = wanted.network, (wanted.hosts, wanted.names, wanted.options)
        version = f"{wanted.version}-{self._kernel.namespace_id(namespace)}"
        pid, stale = self._find_running(network, version), self._find_stale_leases(wanted)
        if pid is not None and not stale and self._loaded.get(network) == files:
            return
        if pid is not None and all(lease.mac for lease in stale):
            self._write_files(network, files)
            os.kill(pid, signal.SIGHUP)
            self._loaded[network] = files
            if not stale or self._release(namespace, wanted, stale):
                LOG.info(
                    "dnsmasq of %s reads %d reservations, %d leases released",
                    network,
                    len(wanted.reserved),
                    len(stale),
                )
                return
        self.stop(network)
        self._remove_stale_leases(
            wanted
        )  # before the files: the old ones say who had an address of IPv6
        self._write_files(network, files)
        self._write(config := self._path(network, f"{version}.conf"), wanted.fixed)
        options = [f"--{name}={self._path(network, kind)}" for name, kind in FILES.items()]
        self._kernel.run("dnsmasq", f"--conf-file={config}", *options, namespace=namespace)
        self._loaded[network] = files
        LOG.info("dnsmasq of %s started", network)

    def networks(self) -> set[str]:
        """Those that have files here."""
        return {path.name.split(".")[0] for path in self._folder.glob("*.*")}

    def remove(self, network: str) -> None:
        """End it and delete its files. Raises KernelError."""
        self.stop(network)
        self._loaded.pop(network, None)
        for path in self._folder.glob(f"{network}.*"):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all, and the folder."""
        for network in self.networks() | set(self._find_processes()):
            self.remove(network)
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, network: str) -> None:
        """End the process, even one whose files were lost. Raises KernelError when it does not
        end."""
        pid = self._find_processes().get(network)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        while pid is not None and self._is_of(pid, network):
            if time.monotonic() > deadline:
                raise KernelError(f"dnsmasq {pid} of network {network} does not end")
            time.sleep(0.002)

    def _is_of(self, pid: int, network: str) -> bool:
        return f"--pid-file={self._path(network, 'pid')}".encode() in _command_line(pid)

    def _find_processes(self) -> dict[str, int]:
        """All that run, network -> pid, found without their files."""
        start = f"--pid-file={self._folder}/".encode()
        found = {
            word[len(start) :].decode(): int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            for word in _command_line(int(path.name))
            if word.startswith(start)
        }
        return {name.removesuffix(".pid"): pid for name, pid in found.items()}

    def _find_running(self, network: str, version: str) -> int | None:
        """Its pid when it was started with this configuration, in this namespace; pids are used
        again."""
        text = self._read_text(network, "pid").strip()
        config = f"--conf-file={self._path(network, f'{version}.conf')}"
        if not text.isdigit() or not self._is_of(int(text), network):
            return None
        return int(text) if config.encode() in _command_line(int(text)) else None

    def _read_text(self, network: str, kind: str) -> str:
        try:
            return self._path(network, kind).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _find_stale_leases(self, wanted: DnsmasqConfig) -> list[DhcpLease]:
        owners = dict(wanted.reserved)
        moved = find_reassigned(self._read_text(wanted.network, "hosts"), owners)
        return stale_leases(self._lease_lines(wanted.network), owners, moved)

    def _lease_lines(self, network: str) -> list[str]:
        """The file as a whole: dnsmasq empties it to write it anew, so one without an end is read
        when it is older."""
        path = self._path(network, "leases")
        while True:
            text = self._read_text(network, "leases")
            is_fresh = path.exists() and 0 <= time.time() - path.stat().st_mtime < REWRITE_SECONDS
            if text.endswith("\n") or not is_fresh:
                return text.splitlines()
            time.sleep(0.002)

    def _release(self, namespace: str, wanted: DnsmasqConfig, leases: list[DhcpLease]) -> bool:
        """Whether dnsmasq forgot these leases, and its file with it. Raises KernelError."""
        for lease in leases:
            words = (DEVICE, lease.address, lease.mac, lease.client_id)
            self._kernel.run("dhcp_release", *words, namespace=namespace)
        deadline = time.monotonic() + RELEASE_TIMEOUT_SECONDS
        while left := self._find_stale_leases(wanted):
            if time.monotonic() > deadline:
                addresses = ", ".join(one.address for one in left)
                LOG.warning("dnsmasq of %s does not forget %s", wanted.network, addresses)
                return False
            time.sleep(0.002)
        return True

    def _remove_stale_leases(self, wanted: DnsmasqConfig) -> None:
        stale = {lease.line for lease in self._find_stale_leases(wanted)}
        kept = [f"{line}\n" for line in self._lease_lines(wanted.network) if line not in stale]
        self._write(self._path(wanted.network, "leases"), "".join(kept))

    def _write_files(self, network: str, files: tuple[str, str, str]) -> None:
        for kind, text in zip(("hosts", "names", "options"), files, strict=True):
            self._write(self._path(network, kind), text)

    def _path(self, network: str, kind: str) -> Path:
        return self._folder / f"{network}.{kind}"

    def _write(self, path: Path, text: str) -> None:
        part = path.with_name(f"{path.name}.new")
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)


def stale_leases(
    lines: list[str], owners: Mapping[str, str], moved: Container[str]
) -> list[DhcpLease]:
    """Leases that nobody may have: ``owners`` are address -> MAC, ``moved`` the addresses that have
    another owner."""
    matches = [found for found in map(LEASE.fullmatch, lines) if found is not None]
    leases = [
        DhcpLease(found[0], found[2], "" if ":" in found[2] else found[1], found[3])
        for found in matches
    ]
    return [
        lease
        for lease in leases
        if lease.address not in owners
        or lease.address in moved
        or (lease.mac and lease.mac.rpartition("-")[2] != owners[lease.address])
    ]


def find_reassigned(hosts: str, owners: Mapping[str, str]) -> set[str]:
    """The addresses of a hosts file that belong to another MAC now."""
    lines = [line.split(",") for line in hosts.splitlines()]
    pairs = [(word.strip("[]"), words[0]) for words in lines for word in words[2:-1]]
    return {address for address, mac in pairs if owners.get(address, mac) != mac}


def _command_line(pid: int) -> list[bytes]:
    """A process's words; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
