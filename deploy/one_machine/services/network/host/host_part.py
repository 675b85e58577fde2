# SPDX-License-Identifier: Apache-2.0
"""The network agent and its loop: get the description, apply it, acknowledge it.

One thread polls with a long poll, which is the heartbeat. The main thread applies and acknowledges,
and checks the kernel every 30 s. At the start the description of the last run is applied before any
request, so all networks work without the network service. SIGTERM stops only the process. The
guests' bridges, rules and DHCP continue, and only metadata is unavailable.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address
from pathlib import Path

from common.service.log import get_logger
from deploy.one_machine.services.json_types import JsonValue
from deploy.one_machine.services.network.host.applier import Applier, TunnelEndpoint
from deploy.one_machine.services.network.host.description import Description, parse
from deploy.one_machine.services.network.host.desired import HostPlace, desire
from deploy.one_machine.services.network.host.kernel import Kernel, KernelError
from deploy.one_machine.services.network.host.metadata import MetadataListeners
from deploy.one_machine.services.network.host.names import Names, bridge
from deploy.one_machine.services.network.host.state import StateFolder

LOG = get_logger("network.host")
NO_ADDRESS = IPv4Address(0)
CHECK_SECONDS, RETRY_SECONDS, POLL_SECONDS = 30.0, 2.0, 20.0
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.2, 10.0


class HostPart(ABC):
    """A network agent: `LocalHostPart`, or the client of a helper process."""

    listeners: MetadataListeners | None = None

    def __init__(self) -> None:
        # The description as received.
        self.tree: JsonValue = None
        self.description = Description()
        # The applied revision.
        self.revision = 0
        # False if something failed that may succeed the next time.
        self.is_whole = True

    @abstractmethod
    def prepare(self) -> None:
        """Set the sysctls of the host's namespace that the guests' networks need.

        Raises:
            KernelError, OSError: A setting cannot be changed, or the helper has ended.
        """

    @abstractmethod
    def restore(self) -> dict[str, str] | None:
        """Apply the description that `save` stored, without a request to the network service.

        Returns:
            Failed port -> reason, or None if there is no valid stored description.

        Raises:
            KernelError, OSError: As `apply`.
        """

    @abstractmethod
    def save(self) -> None:
        """Store the accepted description for `restore` after the next start.

        Raises:
            KernelError, OSError: The description cannot be written, or the helper has ended.
        """

    @abstractmethod
    def apply(self, full: bool = False) -> dict[str, str]:
        """Apply the accepted description to the kernel, and return failed port -> reason.

        The result includes the invalid ports of the description. ``is_whole`` becomes False if
        something failed that may succeed the next time.

        Args:
            full: True to check the whole state of the kernel, False to apply only differences from
                the last success.

        Raises:
            KernelError, OSError: The state of the kernel cannot be read, the state folder cannot
                be written, or the helper fails or has ended.
        """

    def accept(self, tree: JsonValue) -> bool:
        """Parse a description from the service, and store it in this object for `apply`.

        The metadata listeners get the ports at once. Objects that are left out are logged.

        Returns:
            False for an invalid description, which is logged. The former description then stays.
        """
        try:
            self.description = parse(tree)
        except (ValueError, TypeError, AttributeError) as error:
            LOG.error("the description is invalid, so the former description stays", problem=error)
            return False
        self.tree = tree
        if self.listeners is not None:
            self.listeners.set_ports(self.description.ports)
        for complaint in self.description.warnings:
            LOG.warning("an object of the description is left out", problem=complaint)
        for port, reason in self.description.failed.items():
            LOG.error("a port is not wired", port=port, problem=reason)
        return True

    def _listen_to_metadata(self, namespaces: Mapping[str, str]) -> bool:
        """Open metadata listeners in exactly these namespaces, and return True if all are open.

        Failures are logged. If this object has no ``listeners``, do nothing and return True.

        Args:
            namespaces: Namespace -> network.
        """
        failed = self.listeners.listen(namespaces) if self.listeners is not None else {}
        for name, reason in failed.items():
            LOG.error("a metadata listener cannot be opened", namespace=name, problem=reason)
        return not failed


class LocalHostPart(HostPart):
    """A network agent that applies descriptions itself."""

    def __init__(
        self,
        place: HostPlace,
        kernel: Kernel,
        state: StateFolder,
        listeners: MetadataListeners | None,
    ) -> None:
        super().__init__()
        self.place, self.state, self.listeners = place, state, listeners
        self.applier = Applier(
            kernel, place.names, state, TunnelEndpoint(str(place.tunnel), place.tunnel_port)
        )
        self.listening: Mapping[str, str] = {}

    def prepare(self) -> None:
        self.applier.prepare(self.place.external_gateway)

    def restore(self) -> dict[str, str] | None:
        tree = self.state.description()
        if tree is None or not self.accept(tree):
            return None
        LOG.info("the description of the last run is used", revision=self.description.revision)
        return self.apply(full=True)

    def save(self) -> None:
        self.state.save_description(self.tree)

    def apply(self, full: bool = False) -> dict[str, str]:
        description, state = self.description, self.state
        state.number(description.ports, (bridge(network) for network in description.networks))
        desired, zones = desire(self.place, description, state.ports, state.zones), state.zones
        failed = self.applier.apply(desired, full)
        # Their bridges are removed, so these rules can be removed now.
        if state.zones != zones and not failed:
            failed = self.applier.apply(desire(self.place, description, state.ports, state.zones))
        self.listening = {
            name: id_ for name, id_ in desired.listeners.items() if name not in failed
        }
        self.is_whole = self._listen_to_metadata(self.listening) and not failed
        self.revision = description.revision
        ports = dict(description.failed)
        for port in description.ports.values():
            namespace = self.place.names.network_namespace(port.network)
            for name in ("rules", bridge(port.network), namespace):
                if name in failed:
                    ports[port.id] = failed[name][:500]
        return ports


class Loop:
    """The loop of a network agent.

    Args:
        host: The network agent.
        poll: Called as ``poll(seen, wait)``, as `HostApiClient.description`.
        acknowledge: Called as ``acknowledge(revision, failed)`` to send a report. It raises OSError
            if the report must be sent again.
        check_seconds: Seconds between full checks of the kernel.
    """

    def __init__(
        self,
        host: HostPart,
        poll: Callable[[int, float], JsonValue],
        acknowledge: Callable[[int, dict[str, str]], None],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._host, self._poll, self._acknowledge = host, poll, acknowledge
        self._check_seconds = check_seconds
        # Unlike that of Queue, a signal handler may call put of SimpleQueue at any moment.
        self._received: queue.SimpleQueue[JsonValue] = queue.SimpleQueue()
        self._stop = threading.Event()

    def run(self) -> None:
        """Restore the stored description, then poll, apply and acknowledge until `stop`.

        A failed poll or acknowledgement is logged and repeated.

        Raises:
            KernelError, OSError: A method of ``host`` fails, for example because this machine lacks
                a necessary feature, or because the helper has ended.
        """
        host, tree = self._host, None
        host.prepare()
        # Without a stored description, existing objects stay until the service answers.
        failed = host.restore() or {}
        threading.Thread(target=self._receive, name="description", daemon=True).start()
        last_check, is_unacknowledged = time.monotonic(), True
        while not self._stop.is_set():
            if is_unacknowledged:
                is_unacknowledged = not self._report(failed)
            if tree is not None:
                # After the report, because the disk is slow.
                host.save()
            check = self._check_seconds
            if not host.is_whole:
                check = min(RETRY_SECONDS, check)
            wait = min(last_check + check - time.monotonic(), 1.0 if is_unacknowledged else check)
            tree = self._next(max(0.0, wait))
            is_due = host.description.revision > 0 and time.monotonic() >= last_check + check
            if tree is not None and not host.accept(tree):
                tree = None
            if tree is not None or is_due:
                began = time.monotonic()
                former_failed, failed = failed, host.apply(full=is_due)
                is_unacknowledged = is_unacknowledged or tree is not None or failed != former_failed
                last_check = time.monotonic() if is_due else last_check
                if tree is not None:
                    LOG.info(
                        "a revision is applied",
                        revision=host.description.revision,
                        ms=1000 * (time.monotonic() - began),
                        ports=len(host.description.ports),
                        failed=len(failed),
                    )

    def stop(self) -> None:
        """Let `run` return after the present step. A signal handler may call this."""
        self._stop.set()
        self._received.put(None)

    def _next(self, wait: float) -> JsonValue:
        """Return the newest description, or None if none arrives within ``wait`` seconds.

        `stop` ends the wait, also with None.
        """
        try:
            tree = self._received.get(timeout=wait)
            while not self._received.empty():
                tree = self._received.get_nowait()
        except queue.Empty:
            return None
        return tree

    def _report(self, failed: dict[str, str]) -> bool:
        try:
            self._acknowledge(self._host.revision, failed)
        except OSError as error:
            LOG.warning(
                "a revision cannot be acknowledged", revision=self._host.revision, problem=error
            )
            return False
        return True

    def _receive(self) -> None:
        seen, pause = self._host.revision, MIN_PAUSE_SECONDS
        while not self._stop.is_set():
            try:
                tree = self._poll(seen, POLL_SECONDS)
            except OSError as error:
                LOG.warning(
                    "the network service does not answer; the next try follows",
                    seconds=pause,
                    problem=error,
                )
                self._stop.wait(pause)
                pause = min(MAX_PAUSE_SECONDS, pause * 2)
                continue
            pause = MIN_PAUSE_SECONDS
            if tree is not None:
                revision = tree.get("revision") if isinstance(tree, dict) else None
                seen = revision if isinstance(revision, int) else seen
                self._received.put(tree)


def clean(names: Names, kernel: Kernel, folder: Path) -> list[str]:
    """Remove all objects of a network agent from the kernel, and the files of ``StateFolder``.

    The agent must not run. After a failure the files stay.

    Args:
        names: The names of the agent's objects.
        kernel: The kernel.
        folder: The agent's state folder.

    Returns:
        The failures as texts.
    """
    try:
        return LocalHostPart(
            HostPlace(names, NO_ADDRESS), kernel, StateFolder(folder), None
        ).applier.clean()
    except (KernelError, OSError) as error:
        return [str(error)]
