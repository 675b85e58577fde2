# SPDX-License-Identifier: Apache-2.0
"""The virt driver: what a host can do with guests.

Called by ``compute_agent.verbs`` only. Two implementations, ``virt.memory`` and ``virt.libvirt``, pass one
contract suite (tests/contract/test_virt_driver.py). Every method that changes something is repeatable:
called again after a crash at any line it ends in the same state. A fence is written into the domain's
metadata by every verb that defines or starts it, and is what ``domains`` reports. Nothing is started or resumed without
``Run.require_lease`` right before. A hypervisor or image service
that does not answer is ``errors.Unavailable``: what became of the verb is not known, do it again later.
"""
from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from common import errors
from common.models import DomainState, GuestSpec, HostInventory, ImageRef, Interface

#: Power states as the Compute API numbers them.
NOSTATE, RUNNING, PAUSED, SHUTDOWN, CRASHED, SUSPENDED = 0, 1, 3, 4, 6, 7


#: Kinds of consoles.
VNC, SERIAL = "vnc", "serial"

#: What is said of a migration that ended because somebody wished so.
ABORTED = "The migration was aborted."


class VerbFailed(Exception):
    """A definite failure: the verb did not happen and nothing of it runs.

    ``str()`` is safe for the tenant, ``details`` is for the operator, ``retryable`` says whether another
    host may succeed (a full disk: yes; a hostile image: no).
    """

    def __init__(self, text: str, *, details: str = "", retryable: bool = False) -> None:
        super().__init__(text)
        self.details = details
        self.retryable = retryable


class Cancelled(Exception):
    """A higher fence arrived while the verb ran; it stopped within five seconds."""


def no_wish() -> str:
    """Nobody wishes anything of a migration."""
    return ""


def not_told(numbers: Mapping[str, int]) -> None:
    """Nobody asks how far a migration is."""


def granted() -> bool:
    """Nobody may take the host's guests for dead."""
    return True


@dataclass(frozen=True, slots=True)
class Run:
    """What a verb may use while it runs: where to tell its phase, and whether to stop.

    ``phase`` takes one of "waiting to fetch image", "fetching image", "making disks", "starting", "waiting for the
    network" …; ``cancelled`` is asked at least every few seconds by anything long and answers True when the verb must
    raise ``Cancelled``. Of a live migration ``wish`` says "abort" or "complete" once somebody has asked for it, and
    ``measured`` takes how far it is, in bytes: memory_total, memory_processed, memory_remaining, and disk_ likewise.
    ``may_start``: is the command still wanted, and has a conductor been heard so lately, and without a gap since it was
    sent, that it cannot have taken this host's guests for dead?
    """

    phase: Callable[[str], None]
    cancelled: Callable[[], bool]
    wish: Callable[[], str] = no_wish
    measured: Callable[[Mapping[str, int]], None] = not_told
    may_start: Callable[[], bool] = granted

    def require_lease(self) -> None:
        """Stands right before whatever makes CPUs of a guest run that did not: a verb that took long may have outlived
        the lease with which it began. Raises Unavailable: the conductor sends the command again if it still wants it.
        """
        if not self.may_start():
            raise errors.Unavailable("The host has not heard a conductor lately, which may have its guests started "
                                     "elsewhere: nothing is started until it has.")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a guest, as another host may read it. size: its length; bytes: what of it is data, not holes."""

    name: str
    size: int
    bytes: int


class Peer(Protocol):
    """A guest's files at the host that has them, read from another."""

    def parts(self) -> list[Part]:
        """What there is to read. VerbFailed when the host does not know of the offer, Unavailable when it does not
        answer."""

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        """(offset, data) in rising order, at most 1 MiB each; what is left out is a hole. What arrives is what was
        sent: a difference is VerbFailed, a lost connection Unavailable."""


#: Stores an image: takes its bytes, in chunks of at most 1 MiB, and returns when the image service has them all.
ImageWriter = Callable[[Iterator[bytes]], None]

#: Opens an image for reading: image id -> chunks of bytes, at most 1 MiB each.
ImageReader = Callable[[str], Iterator[bytes]]


class Driver(Protocol):
    """What each hypervisor must be able to do."""

    def inventory(self) -> HostInventory:
        """What this host has in all."""

    def boot_id(self) -> str:
        """A text that changes with every boot of the host."""

    def domains(self) -> list[DomainState]:
        """All domains of ours (those that carry our metadata), whatever their state; state only, cheap."""

    def ensure_image(self, image: ImageRef, read_image: ImageReader, run: Run) -> None:
        """Have the image on this host, for guests to come. Repeatable."""

    def ensure_guest(self, spec: GuestSpec, read_image: ImageReader, run: Run) -> DomainState:
        """Image, disks, config drive, domain with its interfaces, start; with ``spec.paused`` its CPUs wait for
        ``ensure_running``. After VerbFailed nothing of it is left running."""

    def ensure_running(self, server: str, fence: int, run: Run) -> DomainState:
        """Start the domain if it does not run; one that is paused goes on. VerbFailed when it does not exist.
        Whatever starts a domain waits for a bridge that is not there yet, for as long as ``virt.interfaces`` says."""

    def ensure_stopped(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        """Ask the guest to power off; after ``timeout`` seconds (0: at once) pull the plug."""

    def pull_plug(self, server: str) -> None:
        """Have the domain off at once, and no memory saved, its fence and its files as they are: it must not run here,
        as the conductor says. No domain: nothing to do. Repeatable."""

    def reboot(self, server: str, fence: int, timeout: float, run: Run) -> DomainState:
        """Restart the domain once for this fence: ACPI shutdown for ``timeout`` seconds, then hard.

        A domain that runs and already carries this fence has been rebooted: nothing is done again.
        A domain that is off is started.
        """

    def ensure_paused(self, server: str, fence: int, run: Run) -> DomainState:
        """Stop the domain's CPUs where they are; its memory stays. VerbFailed when it does not run."""

    def ensure_suspended(self, server: str, fence: int, run: Run) -> DomainState:
        """Save the domain's memory to disk and end it; ``ensure_running`` goes on from there. A save that was cut
        off leaves the guest as it was before."""

    def rebuild(self, spec: GuestSpec, read_image: ImageReader, runs: bool, run: Run, keep_ephemeral: bool = False
                ) -> DomainState:
        """New disks from ``spec.image`` in place of the old ones, once for this fence; ``runs``: started afterwards,
        else left off; ``keep_ephemeral``: ephemeral disks that are here stay. Before anything of the old guest is given
        up the image is here and verified."""

    def rescue(self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, run: Run) -> DomainState:
        """Boot from a disk made of ``image``, with the guest's own disk as the second one. ``spec`` is the guest as
        it is; its own disk is not changed. Repeatable."""

    def unrescue(self, spec: GuestSpec, run: Run) -> DomainState:
        """Boot from the guest's own disk again and remove the rescue disk. Repeatable."""

    def attach_interface(self, server: str, fence: int, interface: Interface, run: Run) -> DomainState:
        """Plug the interface in, known by its MAC address: into the running guest and into what is started next.
        Repeatable."""

    def detach_interface(self, server: str, fence: int, interface: Interface, run: Run) -> DomainState:
        """Pull the interface out of both. VerbFailed when the running guest does not let go of it within 20 seconds:
        then it stays in both. Repeatable."""

    def snapshot(self, server: str, fence: int, write_image: ImageWriter, run: Run) -> int:
        """Give the bytes of the guest's disk as one moment saw it, a qcow2 that refers to nothing, to
        ``write_image``; returns their number. The guest goes on (its file systems are frozen for the moment itself
        when its agent can). Nothing is left on the host. ``run.phase`` tells "copying disk 40 %", "uploading 70 %"."""

    def inject_nmi(self, server: str) -> None:
        """Interrupt the guest so that its kernel dumps. Never repeated. VerbFailed when it does not run."""

    def set_password(self, server: str, user: str, password: str) -> None:
        """Set a password inside the guest, through its agent. Never repeated. VerbFailed when there is no agent
        or it refuses."""

    def diagnostics(self, server: str) -> dict[str, Any]:
        """The guest's counters in the shape of the API's 2.48: state, driver, hypervisor, hypervisor_os, uptime,
        config_drive, num_cpus, num_disks, num_nics, memory_details, cpu_details, disk_details, nic_details.
        VerbFailed when it does not run."""

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        """Destroy and undefine the domain, remove its disks and files. No domain: still removes files. ``keep_files``:
        the guest of another host has them, on shared storage."""

    # --- a guest that moves while it is off ---
    def offer(self, server: str, fence: int, secret: str, run: Run) -> dict[str, Any]:
        """Let whoever brings the secret read the guest's files, until it is offered with another secret, started or
        removed; returns {"bytes": of data}. Of a guest that runs only the files that it cannot change. Repeatable."""

    def parts(self, server: str, secret: str) -> list[Part]:
        """The files that were offered under this secret; errors.Forbidden when none were."""

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        """The data of one of ``parts``, as ``Peer.read`` gives it; errors.NotFound when there is no such part."""

    def prepare(self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, run: Run) -> dict[str, Any]:
        """Before the guest is stopped where it is: whatever could keep ``receive`` and ``install`` from succeeding
        here fails now (hardware, space), and what lies under its disk is fetched as its host, the ``peer``, says;
        None: it is on shared storage. Leaves no guest. Repeatable."""

    def receive(self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, run: Run) -> dict[str, Any]:
        """The guest's files are here, whole, its disk as large as ``spec.flavor`` wants it; ``peer`` None: they were
        before, on shared storage. No domain is made. Returns {"bytes": that travelled}. Stops within five seconds when
        cancelled; repeatable."""

    def install(self, spec: GuestSpec, runs: bool, run: Run) -> DomainState:
        """A domain as ``spec`` says over the files that are here, started if ``runs`` (with ``spec.paused`` its CPUs
        wait), else off. Repeatable. After VerbFailed nothing of it runs."""

    # --- a guest that is resized where it is ---
    def resize_here(self, spec: GuestSpec, runs: bool, run: Run) -> DomainState:
        """The guest, which is off, becomes as ``spec`` says, once for this fence: what its files were is kept aside,
        its disk grown, its domain defined anew, and started if ``runs``. Repeatable. After VerbFailed nothing runs."""

    def settle_resize(self, spec: GuestSpec, back: bool, resized: int, run: Run) -> DomainState:
        """After ``resize_here`` under the fence ``resized``. ``back`` False: forget what was kept aside; the guest goes
        on as it is. True: the guest, which is off, is again what it was, its domain as ``spec`` says, and stays off.
        Repeatable: with nothing kept aside under that fence its files are right as they are. What an older resize has
        kept aside, which an admin's word has settled, is never taken back; the next resize gives it up."""

    # --- a guest that moves while it runs ---
    def prepare_arrival(self, spec: GuestSpec, peer: Peer, shared: bool, cpu: dict[str, Any], read_image: ImageReader,
                        run: Run) -> dict[str, Any]:
        """At the destination: whether the guest, which runs on a CPU as ``cpu`` (a host's ``cpu_info``) says, can come
        here; if so all that the migration does not bring by itself is here: with storage that is not ``shared`` a disk
        to be filled. Returns what ``live_migrate`` needs to know of this host. VerbFailed says why not. Repeatable."""

    def live_migrate(self, spec: GuestSpec, to: dict[str, Any], shared: bool, run: Run) -> dict[str, Any]:
        """At the source: move the running (or paused) guest; ``spec`` is the guest as it will be there, ``to`` what
        ``prepare_arrival`` returned and the destination's address. Returns {"bytes", "job_seconds"} when it is not
        here any more. VerbFailed: it is here, as before. Found begun after a crash, the job is joined. Obeys
        ``run.wish``; when cancelled the job is aborted."""

    def arrived(self, spec: GuestSpec, run: Run) -> DomainState:
        """At the destination: the guest that came runs (or is paused) here, defined as ``spec`` says and with its
        fence. VerbFailed: it is not here, and nothing of it runs. Repeatable."""

    def console_output(self, server: str, limit: int) -> str:
        """The last ``limit`` bytes of the serial console, decoded with replacement; also of a domain that
        is off. VerbFailed when the server has no console log here."""

    def console(self, server: str, kind: str) -> socket.socket:
        """A connection to the guest's console, whatever bytes pass: ``kind`` VNC speaks RFB and asks for no password,
        SERIAL is the terminal on the first serial port, for one reader at a time. VerbFailed when the guest does not
        run."""

    def watch(self, changed: Callable[[str], None]) -> None:
        """Call ``changed(server)`` from a thread of the driver whenever a domain's state changed."""

    def close(self) -> None:
        """Let go of the hypervisor; guests run on."""
