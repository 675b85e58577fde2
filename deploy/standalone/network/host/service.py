# SPDX-License-Identifier: Apache-2.0
"""The host part's loop: ask for the description, make it true, say so.

One thread asks (a long poll, which is the heartbeat), the main thread applies and acknowledges; every 30 s it checks
that the kernel still has everything. At the start the description of the last run is applied before anybody is asked:
a host whose network service is dead comes up with all its networks. SIGTERM stops the process and nothing else: the
guests' bridges, rules and DHCP stay, only metadata pauses.
"""
from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from deploy.standalone.network.host.applier import Applier, Tunnels
from deploy.standalone.network.host.description import Description, parse
from deploy.standalone.network.host.desired import Place, desire
from deploy.standalone.network.host.kernel import Failed, Kernel
from deploy.standalone.network.host.ledger import Ledger
from deploy.standalone.network.host.metadata import Listeners
from deploy.standalone.network.host.names import Names, bridge

LOG = logging.getLogger("network.host")
NOWHERE = IPv4Address(0)
CHECK, AGAIN, WAIT, FIRST_PAUSE, LONGEST_PAUSE = 30.0, 2.0, 20.0, 0.2, 10.0      # seconds


class Host:
    """One host part: what it was told, and what it does about it. ``put`` sends an acknowledgement."""

    def __init__(self, place: Place, kernel: Kernel, ledger: Ledger, listeners: Listeners | None) -> None:
        self.place, self.ledger, self.listeners = place, ledger, listeners
        self.applier = Applier(kernel, place.names, ledger, Tunnels(str(place.tunnel), place.tunnel_port))
        self.told = Description()
        self.revision = 0
        self.is_whole = True       # nothing failed that may work the next time

    def take(self, tree: Any) -> bool:
        """Take in what the service says. Whether it was understood."""
        try:
            self.told = parse(tree)
        except (ValueError, TypeError, AttributeError) as problem:
            LOG.error("the description is not understood: %s", problem)
            return False
        for complaint in self.told.complaints:
            LOG.warning("description: %s", complaint)
        for port, reason in self.told.failed.items():
            LOG.error("port %s: %s", port, reason)
        return True

    def apply(self, full: bool = False) -> dict[str, str]:
        """Make it so; the failed ports with their reasons."""
        told, ledger = self.told, self.ledger
        ledger.number(told.ports, (bridge(network) for network in told.networks))
        desired, zones = desire(self.place, told, ledger.ports, ledger.zones), ledger.zones
        if self.listeners is not None:
            self.listeners.know(told.ports)
        wrong = self.applier.apply(desired, full)
        if ledger.zones != zones and not wrong:      # bridges went, and now their rules may go
            wrong = self.applier.apply(desire(self.place, told, ledger.ports, ledger.zones))
        silent: dict[str, str] = {}
        if self.listeners is not None:
            spaces = {name: id_ for name, id_ in desired.listeners.items() if name not in wrong}
            silent = self.listeners.listen(spaces)
            for name, reason in silent.items():
                LOG.error("%s: %s", name, reason)
        self.is_whole = not wrong and not silent
        self.revision = told.revision
        return {**told.failed, **self._failed(wrong)}

    def _failed(self, wrong: dict[str, str]) -> dict[str, str]:
        failed = {}
        for port in self.told.ports.values():
            for name in ("rules", bridge(port.network), self.place.names.network_space(port.network)):
                if name in wrong:
                    failed[port.id] = wrong[name][:500]
        return failed


class Loop:
    """Runs a Host. ``ask(seen, wait)`` returns a description or None; ``acknowledge(revision, failed)`` sends."""

    def __init__(self, host: Host, ask: Callable[[int, float], Any],
                 acknowledge: Callable[[int, dict[str, str]], None], check: float = CHECK) -> None:
        self._host, self._ask, self._acknowledge, self._check = host, ask, acknowledge, check
        self._heard: queue.Queue[Any] = queue.Queue()
        self._stop = threading.Event()

    def run(self) -> None:
        """Until `stop`. Raises Failed when this machine lacks what it takes."""
        host = self._host
        host.applier.prepare(host.place.external_gateway)
        failed: dict[str, str] = {}
        if (tree := host.ledger.description()) is not None and host.take(tree):
            LOG.info("revision %d of the last run", host.told.revision)
            failed = host.apply(full=True)      # without one, what is there stays until the service is heard
        asking = threading.Thread(target=self._listen, name="description", daemon=True)
        asking.start()
        checked, owed = time.monotonic(), True
        while not self._stop.is_set():
            if owed:
                owed = not self._tell(failed)
            if tree is not None:
                host.ledger.keep_description(tree)      # after the answer: the disk is slow
            check = self._check if host.is_whole else min(AGAIN, self._check)
            tree = self._next(max(0.0, min(checked + check - time.monotonic(), 1.0 if owed else check)))
            due = host.told.revision > 0 and time.monotonic() >= checked + check
            if tree is not None and not host.take(tree):
                tree = None
            if tree is not None or due:
                began = time.monotonic()
                before, failed = failed, host.apply(full=due)
                owed = owed or tree is not None or failed != before
                checked = time.monotonic() if due else checked
                if tree is not None:
                    LOG.info("revision %d applied in %.1f ms, %d ports, %d failed", host.told.revision,
                             1000 * (time.monotonic() - began), len(host.told.ports), len(failed))

    def stop(self) -> None:
        """End soon; may be called by a signal handler."""
        self._stop.set()
        self._heard.put(None)

    def _next(self, wait: float) -> Any:
        """The newest description that came, None when none came in time."""
        try:
            tree = self._heard.get(timeout=wait)
            while not self._heard.empty():
                tree = self._heard.get_nowait()
        except queue.Empty:
            return None
        return tree

    def _tell(self, failed: dict[str, str]) -> bool:
        try:
            self._acknowledge(self._host.revision, failed)
        except OSError as problem:
            LOG.warning("revision %d not acknowledged: %s", self._host.revision, problem)
            return False
        return True

    def _listen(self) -> None:
        seen, pause = self._host.revision, FIRST_PAUSE
        while not self._stop.is_set():
            try:
                tree = self._ask(seen, WAIT)
            except OSError as problem:
                LOG.warning("the network service does not answer, again in %.1f s: %s", pause, problem)
                self._stop.wait(pause)
                pause = min(LONGEST_PAUSE, pause * 2)
                continue
            pause = FIRST_PAUSE
            if tree is not None:
                revision = tree.get("revision") if isinstance(tree, dict) else None
                seen = revision if isinstance(revision, int) else seen
                self._heard.put(tree)


def clean(names: Names, kernel: Kernel, folder: Path) -> list[str]:
    """Remove everything the host part with this state folder ever made; what could not be is in the answer."""
    try:
        return Host(Place(names, NOWHERE), kernel, Ledger(folder), None).applier.clean()
    except (Failed, OSError) as problem:
        return [str(problem)]
