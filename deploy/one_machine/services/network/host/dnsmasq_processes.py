# SPDX-License-Identifier: Apache-2.0
"""The dnsmasq processes, one for each network: start, adoption from an earlier run, reload, end.

dnsmasq is a daemon that outlives the network agent, so guests keep their addresses without the
agent. The files are in the runtime folder. The name of the configuration file contains the hash and
the id of the namespace, so the command line of a process shows its configuration and place.

Invariant: an address of a port is given to the port's MAC at its first request, also if another MAC
had it before. A deleted port has no lease. dnsmasq keeps a lease until it expires, regardless of
the reservations. An IPv4 lease is released in the guest's name (dhcp_release). An IPv6 lease, which
names no MAC, is removed from the file, and dnsmasq starts anew. Stale leases are read from
dnsmasq's own file each time, so a kill of the agent loses nothing.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.service.log import get_logger
from deploy.one_machine.services.network.host.dnsmasq_config import DnsmasqConfig
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError
from deploy.one_machine.services.network.host.names import Names

LOG = get_logger("network.host")
STOP_TIMEOUT_SECONDS, RELEASE_TIMEOUT_SECONDS, REWRITE_SECONDS = 5.0, 5.0, 0.1
DEVICE = "dhcp"
#: dnsmasq's option -> the end of the file's name.
FILES = {
    "pid-file": "pid",
    "dhcp-leasefile": "leases",
    "dhcp-hostsfile": "hosts",
    "addn-hosts": "names",
    "dhcp-optsfile": "options",
    "log-facility": "log",
}
#: Expiry, MAC (or the client's IPv6 number), address, name, client id.
LEASE = re.compile(r"\d+ (\S+) ([0-9a-f.:]+) \S+ (\S+)")


@dataclass(frozen=True, slots=True)
class DhcpLease:
    """A line of dnsmasq's lease file.

    Attributes:
        line: The line.
        address: The address.
        mac: The MAC address, with the type of device and "-" before it if that is not Ethernet. ""
            for IPv6.
        client_id: The client's id.
    """

    line: str
    address: str
    mac: str
    client_id: str


class DnsmasqProcesses:
    """All dnsmasq processes of one network agent."""

    def __init__(self, kernel: Kernel, names: Names) -> None:
        self._kernel, self._names, self._folder = kernel, names, names.runtime
        # Network -> the files that dnsmasq has read.
        self._loaded: dict[str, tuple[str, str, str]] = {}

    def ensure(self, namespace: str, desired: DnsmasqConfig) -> None:
        """Let the dnsmasq of a namespace run with this configuration, without stale leases.

        Start a missing dnsmasq. Restart dnsmasq if ``fixed`` or the namespace changed, if an IPv6
        lease is stale, or if a stale IPv4 lease stays after the release. Otherwise reload the
        files, unless this object has loaded the same files before and no lease is stale.

        Raises:
            KernelError, OSError: dnsmasq cannot be started or stopped, dhcp_release fails, there is
                no such namespace, or a file cannot be written.
        """
        self._folder.mkdir(exist_ok=True)
        self._folder.chmod(0o755)
        network, files = desired.network, (desired.hosts, desired.names, desired.options)
        version = f"{desired.version}-{self._kernel.namespace_id(namespace)}"
        pid, stale = self._find_running(network, version), self._find_stale_leases(desired)
        if pid is not None and not stale and self._loaded.get(network) == files:
            return
        if pid is not None and all(lease.mac for lease in stale):
            self._write_files(network, files)
            os.kill(pid, signal.SIGHUP)
            self._loaded[network] = files
            if not stale or self._release(namespace, desired, stale):
                LOG.info(
                    "dnsmasq reads its reservations again",
                    network=network,
                    reservations=len(desired.reserved),
                    released_leases=len(stale),
                )
                return
        self.stop(network)
        # This comes before the new files, because the old ones show the owners of IPv6 addresses.
        self._remove_stale_leases(desired)
        self._write_files(network, files)
        self._write(config := self._path(network, f"{version}.conf"), desired.fixed)
        options = [f"--{name}={self._path(network, kind)}" for name, kind in FILES.items()]
        self._kernel.run("dnsmasq", f"--conf-file={config}", *options, namespace=namespace)
        self._loaded[network] = files
        LOG.info("dnsmasq is started", network=network)

    def networks(self) -> set[str]:
        """Return the ids of the networks that have files in the runtime folder."""
        return {path.name.split(".")[0] for path in self._folder.glob("*.*")}

    def remove(self, network: str) -> None:
        """End the dnsmasq of a network, if there is one, and delete all files of the network.

        Raises:
            KernelError, OSError: dnsmasq does not end, or a file cannot be deleted.
        """
        self.stop(network)
        self._loaded.pop(network, None)
        for path in self._folder.glob(f"{network}.*"):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """End all dnsmasq processes of this agent and remove the runtime folder.

        Raises:
            KernelError, OSError: A dnsmasq does not end, or a file cannot be deleted.
        """
        for network in self.networks() | set(self._find_processes()):
            self.remove(network)
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self, network: str) -> None:
        """End the dnsmasq of a network, also if the pid file is lost. The files stay.

        Without a running dnsmasq do nothing.

        Raises:
            KernelError: dnsmasq does not end within ``STOP_TIMEOUT_SECONDS``.
        """
        pid = self._find_processes().get(network)
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
        while pid is not None and self._is_of(pid, network):
            if time.monotonic() > deadline:
                raise KernelError(f"the dnsmasq process {pid} of network {network} does not end")
            time.sleep(0.002)

    def _is_of(self, pid: int, network: str) -> bool:
        return f"--pid-file={self._path(network, 'pid')}".encode() in _command_line(pid)

    def _find_processes(self) -> dict[str, int]:
        """Return network -> process id, for the running dnsmasq processes of this agent.

        This searches /proc, so lost pid files do not matter.
        """
        start = f"--pid-file={self._folder}/".encode()
        pids = {
            word[len(start) :].decode(): int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            for word in _command_line(int(path.name))
            if word.startswith(start)
        }
        return {name.removesuffix(".pid"): pid for name, pid in pids.items()}

    def _find_running(self, network: str, version: str) -> int | None:
        """Return the process id of the network's dnsmasq if it has this version, otherwise None.

        The id comes from the pid file. The command line is compared, because process ids are
        recycled.

        Args:
            network: The network.
            version: The hash of the configuration and the id of the namespace.
        """
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
        """Return the lines of the lease file, or an empty list without a file.

        dnsmasq empties the file to rewrite it. A file without a final line break is therefore read
        again until ``REWRITE_SECONDS`` after the last change.
        """
        path = self._path(network, "leases")
        while True:
            text = self._read_text(network, "leases")
            is_fresh = path.exists() and 0 <= time.time() - path.stat().st_mtime < REWRITE_SECONDS
            if text.endswith("\n") or not is_fresh:
                return text.splitlines()
            time.sleep(0.002)

    def _release(self, namespace: str, wanted: DnsmasqConfig, leases: list[DhcpLease]) -> bool:
        """Release IPv4 leases in the guests' names, and wait until dnsmasq has removed them.

        Args:
            namespace: The namespace of the network's dnsmasq.
            wanted: The desired configuration, which decides about stale leases.
            leases: The leases to release.

        Returns:
            False if the file still has a stale lease after ``RELEASE_TIMEOUT_SECONDS``. The caller
            then restarts dnsmasq.

        Raises:
            KernelError: dhcp_release fails.
        """
        for lease in leases:
            words = (DEVICE, lease.address, lease.mac, lease.client_id)
            self._kernel.run("dhcp_release", *words, namespace=namespace)
        deadline = time.monotonic() + RELEASE_TIMEOUT_SECONDS
        while remaining := self._find_stale_leases(wanted):
            if time.monotonic() > deadline:
                addresses = ", ".join(stale_lease.address for stale_lease in remaining)
                LOG.warning(
                    "dnsmasq keeps stale leases, so it is restarted",
                    network=wanted.network,
                    addresses=addresses,
                )
                return False
            time.sleep(0.002)
        return True

    def _remove_stale_leases(self, wanted: DnsmasqConfig) -> None:
        stale = {lease.line for lease in self._find_stale_leases(wanted)}
        lines = [f"{line}\n" for line in self._lease_lines(wanted.network) if line not in stale]
        self._write(self._path(wanted.network, "leases"), "".join(lines))

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
    """Return the leases that must not exist any more.

    The address of such a lease is not in ``owners``, is in ``moved``, or has another MAC address in
    ``owners``. IPv6 leases contain no MAC address to compare. Lines that are no leases are ignored.

    Args:
        lines: The lines of the lease file.
        owners: Address -> MAC address of the port on this host.
        moved: The result of `find_reassigned`.
    """
    matches = [match for match in map(LEASE.fullmatch, lines) if match is not None]
    leases = [
        DhcpLease(match[0], match[2], "" if ":" in match[2] else match[1], match[3])
        for match in matches
    ]
    return [
        lease
        for lease in leases
        if lease.address not in owners
        or lease.address in moved
        or (lease.mac and lease.mac.rpartition("-")[2] != owners[lease.address])
    ]


def find_reassigned(hosts: str, owners: Mapping[str, str]) -> set[str]:
    """Return the addresses of a hosts file that belong to another MAC address now.

    Args:
        hosts: The text of dnsmasq's present hosts file.
        owners: Address -> MAC address of the port. An address without a port is not returned.
    """
    lines = [line.split(",") for line in hosts.splitlines()]
    pairs = [(word.strip("[]"), words[0]) for words in lines for word in words[2:-1]]
    return {address for address, mac in pairs if owners.get(address, mac) != mac}


def _command_line(pid: int) -> list[bytes]:
    """Return the arguments of a process, or an empty list after its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
