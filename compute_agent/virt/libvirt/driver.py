# SPDX-License-Identifier: Apache-2.0
"""The virt driver for QEMU and KVM through libvirt.

Implements ``virt.driver.Driver`` for ``compute_agent.verbs``. Each verb is passed to one of these
packages:

* ``guests``: make, rebuild, rescue, resize and remove guests, and take their snapshots.
* ``volumes``: attach, detach, copy and merge volumes, through ``guests.volume_verbs``.
* ``migration``: move guests to and from other hosts.
* ``domains``: start and stop domains, run long jobs, and call libvirt.
* ``disks``: images and disk files. ``xml``: definitions of domains.

Invariant: a verb first checks the present state and then does only what is missing, so that the
agent can repeat it after a crash at any line. While libvirtd is away a verb waits and repeats
itself, except a verb that must run at most once.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from common.domain import errors
from common.domain.json_types import JsonObject
from common.domain.models import (
    AttachedShare,
    Belongings,
    DomainState,
    GuestSpec,
    HostInventory,
    ImageRef,
    Interface,
)
from common.domain.server_facts import HostedServer
from common.service.log import get_logger
from compute_agent.privileged.bridges import BridgeHelper
from compute_agent.verb_context import (
    Cancelled,
    ImageReader,
    ImageWriter,
    Part,
    Peer,
    VerbContext,
    VerbFailed,
)
from compute_agent.virt.download_limit import MAX_DOWNLOADS
from compute_agent.virt.driver import RUNNING, SERIAL, VNC
from compute_agent.virt.interfaces import plug
from compute_agent.virt.libvirt.disks import images
from compute_agent.virt.libvirt.disks.images import ImageCache
from compute_agent.virt.libvirt.disks.local_disks import LocalDisks
from compute_agent.virt.libvirt.domains import guest_agent, power
from compute_agent.virt.libvirt.domains.connection import Connection
from compute_agent.virt.libvirt.domains.still_guests import StillGuests
from compute_agent.virt.libvirt.guests import consoles, diagnostics, interfaces, resizes, snapshots
from compute_agent.virt.libvirt.guests.config_drive import ConfigDrives
from compute_agent.virt.libvirt.guests.guests import LibvirtGuests
from compute_agent.virt.libvirt.guests.shares import GuestShares
from compute_agent.virt.libvirt.guests.volume_verbs import QUIET, VolumeVerbs
from compute_agent.virt.libvirt.host import host
from compute_agent.virt.libvirt.migration import cold_migration, incoming_migration, live_migration
from compute_agent.virt.libvirt.migration.incoming import records
from compute_agent.virt.libvirt.migration.incoming.records import Incoming
from compute_agent.virt.libvirt.volumes.connectors import Connectors
from compute_agent.virt.libvirt.volumes.secrets import LibvirtSecrets
from compute_agent.virt.libvirt.volumes.volumes import GuestVolumes
from compute_agent.virt.libvirt.xml import running_domain, volume_xml
from compute_agent.virt.mounts import Mounts, host_mounts

LOG = get_logger(__name__)
Answer = TypeVar("Answer")
RETRY_SECONDS = 0.5


class LibvirtDriver(VolumeVerbs):
    """Implements ``Driver`` with one libvirtd. Thread-safe for different servers.

    Args:
        uri: libvirt's connection URI, for example ``qemu:///system``.
        state_dir: Folder of ``instances`` and ``images``. QEMU's user must be able to read the
            files below.
        virt_type: ``kvm``, ``qemu``, or ``test`` for libvirt's ``test:///``. ``auto`` selects kvm
            if a probe guest runs under KVM, else qemu.
        about: Options of the host's inventory and of the placement of guests. For this and every
            other argument that is None, the driver uses defaults.
        image_ttl: Seconds for which an unused image stays in the cache.
        image_fetches: Limit of images that are downloaded at the same time. 0: no limit.
        libvirt_timeout: Seconds for which a verb waits for a libvirtd that does not answer.
        spice: Guests defined from now on have a SPICE screen in addition to VNC.
    """

    def __init__(
        self,
        uri: str,
        state_dir: str | Path,
        virt_type: str = "auto",
        *,
        about: host.HostOptions | None = None,
        image_ttl: float = 24 * 3600,
        image_fetches: int = MAX_DOWNLOADS,
        libvirt_timeout: float = 60,
        config_drives: ConfigDrives | None = None,
        migration: live_migration.MigrationOptions | None = None,
        local_disks: LocalDisks | None = None,
        mounts: Mounts | None = None,
        connectors: Connectors | None = None,
        spice: bool = False,
        bridges: BridgeHelper | None = None,
    ) -> None:
        self._state_dir = Path(state_dir).resolve()
        instances = self._state_dir / "instances"
        for folder in (self._state_dir, instances):
            folder.mkdir(parents=True, exist_ok=True)
            # QEMU may run as another user. That user must be able to enter the folder, and need not
            # list the folders of other servers.
            if folder.stat().st_mode & 0o777 != host.FOLDER_MODE:
                folder.chmod(folder.stat().st_mode | 0o711)
        self._configured_virt_type = virt_type
        self._about = about or host.HostOptions()
        self._libvirt_timeout = libvirt_timeout
        self._migration = _add_proof(
            migration or live_migration.MigrationOptions(), self._state_dir
        )
        self._incoming = Incoming(
            records.settings(
                self._state_dir,
                uri,
                self._migration.address,
                self._migration.port,
                self._migration.tls,
            )
        )
        if virt_type != "test":
            consoles.check_length(instances)
        self._images = ImageCache(self._state_dir / "images", image_ttl, image_fetches)
        self._libvirt = Connection(uri, bridges)
        self._connectors = replace(
            connectors or Connectors(), secrets=LibvirtSecrets(self._libvirt)
        )
        self._still = StillGuests(self._libvirt, instances)
        self._guests = LibvirtGuests(
            self._libvirt,
            self._images,
            instances,
            lambda: self.virt_type,
            lambda assignment: host.place(self._libvirt, self._about, assignment),
            config_drives or ConfigDrives(),
            local_disks or LocalDisks(),
            GuestShares(instances, self._state_dir / "shares", mounts or host_mounts()),
            GuestVolumes(instances, self._connectors),
            spice=spice,
        )

    @functools.cached_property
    def virt_type(self) -> str:
        """The domain type of guests: ``kvm``, ``qemu`` or ``test``.

        With ``auto`` the first call after a boot starts a probe guest, which may take
        ``host.PROBE_TIMEOUT_SECONDS``. Later calls return the stored result.
        """
        if self._configured_virt_type != "auto":
            return self._configured_virt_type
        return "kvm" if host.kvm_works(self._state_dir) else "qemu"

    def inventory(self) -> HostInventory:
        facts = self._retry(QUIET, lambda: host.facts(self._libvirt, self.virt_type))
        host.close_to_others(self._state_dir / "instances", facts.capabilities)
        if self._guests.spice and not host.has_spice(facts):
            self._guests.spice = False
        host_inventory = host.inventory(facts, self._state_dir, self.virt_type, self._about)
        return replace(
            host_inventory,
            facts={
                **host_inventory.facts,
                "spice": self._guests.spice,
                "migration": self._migration.facts,
                "storage": host.storage_id(self._state_dir / "instances"),
                "connector": dict(self._connectors.about),
                "volume_protocols": sorted(self._connectors.table),
            },
        )

    def boot_id(self) -> str:
        return host.boot_id()

    def domains(self) -> list[DomainState]:
        self._update_proxy()
        return [power.state(domain) for domain in self._libvirt.domains() if not domain.is_incoming]

    def guests_volumes(self) -> dict[str, list[str]]:
        return {
            domain.server: list(volume_xml.find_disks(xml))
            for domain in self._libvirt.domains()
            if domain.active
            and not domain.is_incoming
            # The domain may have ended since the list was read.
            and (xml := self._libvirt.describe(domain.server))
        }

    def files_alone(self) -> list[str]:
        # Read the folders before the domains: a guest that is made in between then has both.
        servers = self._guests.folders()
        return sorted(servers - {domain.server for domain in self._libvirt.domains()})

    def server_facts(self, server: str) -> HostedServer:
        self._guests.folder(server)
        return self._guests.facts(server)

    def ensure_image(self, image: ImageRef, read_image: ImageReader, context: VerbContext) -> None:
        self._images.fetch(image, 0, read_image, context)

    def ensure_guest(
        self, spec: GuestSpec, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        return self._retry(context, lambda: self._guests.make(spec, read_image, context))

    def ensure_running(
        self, server: str, fence: int, context: VerbContext, has: Belongings | None = None
    ) -> DomainState:
        def work() -> DomainState:
            self._guests.settle(server, has, context)
            self._guests.shares.mount(server, context)
            self._guests.volumes.connect(server, context)
            return power.start(self._libvirt, server, fence, context)

        self._guests.folder(server)
        return self._retry(context, work)

    def ensure_stopped(
        self, server: str, fence: int, timeout: float, context: VerbContext
    ) -> DomainState:
        def work() -> DomainState:
            power.off(self._libvirt, server, timeout, context)
            self._guests.shares.unmount(server)
            self._libvirt.mark(server, fence=fence)
            return power.state(power.find(self._libvirt, server))

        self._guests.folder(server)
        return self._retry(context, work)

    def pull_plug(self, server: str) -> None:
        self._retry(QUIET, lambda: self._guests.pull_plug(server))

    def reboot(
        self,
        server: str,
        fence: int,
        timeout: float,
        context: VerbContext,
        has: Belongings | None = None,
    ) -> DomainState:
        def work() -> DomainState:
            domain = power.find(self._libvirt, server)
            if (domain.power_state, domain.fence) == (RUNNING, fence):
                return power.state(domain)
            # A guest that may not be started again must not be stopped.
            context.require_lease()
            power.off(self._libvirt, server, timeout, context)
            self._guests.settle(server, has, context)
            self._guests.shares.mount(server, context)
            self._guests.volumes.connect(server, context)
            return power.start(self._libvirt, server, fence, context)

        self._guests.folder(server)
        return self._retry(context, work)

    def ensure_paused(self, server: str, fence: int, context: VerbContext) -> DomainState:
        self._guests.folder(server)
        return self._retry(context, lambda: power.pause(self._libvirt, server, fence))

    def ensure_suspended(self, server: str, fence: int, context: VerbContext) -> DomainState:
        self._guests.folder(server)
        return self._retry(context, lambda: power.suspend(self._libvirt, server, fence, context))

    def rebuild(
        self,
        spec: GuestSpec,
        read_image: ImageReader,
        runs: bool,
        context: VerbContext,
        keep_ephemeral: bool = False,
    ) -> DomainState:
        return self._retry(
            context, lambda: self._guests.rebuild(spec, read_image, runs, context, keep_ephemeral)
        )

    def rescue(
        self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        return self._retry(context, lambda: self._guests.rescue(spec, image, read_image, context))

    def unrescue(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        return self._retry(context, lambda: self._guests.unrescue(spec, context))

    def attach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        self._guests.folder(server)
        plugged = plug(interface)

        def work() -> DomainState:
            state = interfaces.attach(self._libvirt, server, fence, plugged, context)
            self._guests.record_interface(server, interface)
            return state

        return self._retry(context, work)

    def detach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        self._guests.folder(server)
        mac = interface.mac.lower()

        def work() -> DomainState:
            state = interfaces.detach(self._libvirt, server, fence, mac, context)
            self._guests.forget_interface(server, interface.port)
            return state

        return self._retry(context, work)

    def attach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> DomainState:
        self._guests.folder(server)
        return self._retry(
            context, lambda: self._guests.shares.attach(self._libvirt, server, fence, share)
        )

    def detach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> None:
        self._guests.folder(server)
        self._retry(
            context,
            lambda: self._guests.shares.detach(self._libvirt, server, fence, share.share_id),
        )

    def snapshot(
        self, server: str, fence: int, write_image: ImageWriter, context: VerbContext
    ) -> int:
        folder = self._guests.folder(server)
        target = folder / "snapshot.part"
        try:
            self._retry(
                context,
                lambda: snapshots.copy(self._libvirt, server, folder / "disk", target, context),
            )
            return images.upload(target, write_image, context)
        finally:
            target.unlink(missing_ok=True)

    def quiesce(self, server: str, seconds: float) -> None:
        self._guests.folder(server)
        self._still.hold(server, seconds)

    def unquiesce(self, server: str) -> None:
        self._guests.folder(server)
        self._still.let_go(server)

    def inject_nmi(self, server: str) -> None:
        self._require_active(server)
        self._libvirt.on(server, "inject an NMI into the guest", lambda domain: domain.injectNMI(0))

    def set_password(self, server: str, user: str, password: str) -> None:
        self._require_active(server)
        guest_agent.set_password(self._libvirt, server, user, password)

    def diagnostics(self, server: str) -> JsonObject:
        config = str(self._guests.folder(server) / "config")
        return self._retry(QUIET, lambda: diagnostics.of(self._libvirt, server, config))

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        self._guests.folder(server)
        self._withdraw_arrival(server)
        self._retry(QUIET, lambda: self._guests.remove(server, keep_files))
        self._images.evict()

    def offer(self, server: str, fence: int, secret: str, context: VerbContext) -> JsonObject:
        folder = self._guests.folder(server)
        return self._retry(
            context, lambda: cold_migration.offer(self._libvirt, folder, server, fence, secret)
        )

    def parts(self, server: str, secret: str) -> list[Part]:
        return cold_migration.parts(self._libvirt, self._guests.folder(server), server, secret)

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        return cold_migration.read_part(
            self._libvirt, self._guests.folder(server), server, secret, name
        )

    def prepare(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        folder = self._guests.folder(spec.server)
        self._retry(context, lambda: self._guests.check(replace(spec, volumes=[])))
        cold_migration.prepare(self._images, folder, spec, peer, read_image, context)
        return {}

    def receive(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        folder = self._guests.folder(spec.server)
        self._retry(context, lambda: power.refuse_active(self._libvirt, spec.server))
        return cold_migration.receive(
            self._images, folder, spec, peer, read_image, context, self._guests.local
        )

    def install(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        cold_migration.withdraw(self._guests.folder(spec.server))
        return self._retry(context, lambda: self._guests.install(spec, runs, context))

    def resize_here(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        return self._retry(
            context, lambda: resizes.resize(self._libvirt, self._guests, spec, runs, context)
        )

    def settle_resize(
        self, spec: GuestSpec, back: bool, resized: int, context: VerbContext
    ) -> DomainState:
        return self._retry(
            context,
            lambda: resizes.settle(self._libvirt, self._guests, spec, back, resized, context),
        )

    def prepare_incoming(
        self,
        spec: GuestSpec,
        peer: Peer,
        shared: bool,
        cpu: JsonObject,
        read_image: ImageReader,
        context: VerbContext,
        source: str = "",
    ) -> JsonObject:
        self._guests.folder(spec.server)
        self._incoming.withdraw(spec.server)

        def work() -> JsonObject:
            prepared = incoming_migration.prepare(
                self._libvirt,
                self._guests,
                self._images,
                self._migration,
                spec,
                peer,
                shared,
                cpu,
                read_image,
                context,
            )
            self._incoming.expect(
                incoming_migration.build_arrival(
                    self._guests, self._migration, spec, source, shared
                )
            )
            return prepared

        return self._retry(context, work)

    def live_migrate(
        self, spec: GuestSpec, to: JsonObject, shared: bool, context: VerbContext
    ) -> JsonObject:
        self._guests.folder(spec.server)
        describe = functools.partial(incoming_migration.describe_at_destination, spec, to)
        return self._retry(
            context,
            lambda: live_migration.migrate(
                self._libvirt, spec, to, shared, describe, self._migration, context
            ),
        )

    def finish_incoming(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        self._guests.folder(spec.server)
        try:
            domain = self._retry(
                context,
                lambda: incoming_migration.finish(self._libvirt, self._guests, spec, context),
            )
        except VerbFailed:
            self._withdraw_arrival(spec.server)
            raise
        self._withdraw_arrival(spec.server)
        return power.state(domain)

    def console_output(self, server: str, limit: int) -> str:
        return consoles.output(self._guests.folder(server), limit)

    def console_kinds(self, server: str) -> list[str]:
        self._require_active(server)
        return [*running_domain.screens(self._libvirt.describe(server)), SERIAL]

    def console(self, server: str, kind: str) -> socket.socket:
        self._require_active(server)
        if kind == VNC:
            return self._libvirt.open_screen(server)
        xml = self._libvirt.describe(server)
        if kind == SERIAL:
            return consoles.open_serial(running_domain.serial_socket(xml))
        return self._libvirt.open_screen(server, consoles.screen(xml, kind))

    def watch(self, changed: Callable[[str], None]) -> None:
        self._libvirt.watch(changed)

    def close(self) -> None:
        self._incoming.close()
        self._still.close()
        self._libvirt.close()

    def _withdraw_arrival(self, server: str) -> None:
        """Stop admitting the incoming guest, and stop the proxy if no other guest is expected."""
        self._incoming.withdraw(server)
        self._update_proxy()

    def _update_proxy(self) -> None:
        """Start the proxy for incoming migrations if a guest is expected, else stop the proxy.

        ``domains`` calls this for every report, because the proxy may have ended by itself or with
        the previous agent. A failure is logged and not raised.
        """
        try:
            self._incoming.keep()
        except (VerbFailed, OSError) as error:
            LOG.error(
                "the proxy for incoming live migrations does not run, and no guest can arrive",
                problem=error,
                details=getattr(error, "details", ""),
            )

    def _require_active(self, server: str) -> None:
        """Wait until libvirtd answers, and raise VerbFailed unless the guest is active.

        Verbs that must run at most once call this first, and then call libvirt without ``_retry``.

        Raises:
            VerbFailed: The guest is off or does not exist, or the id is not a UUID.
            NoAnswer: libvirtd did not answer within ``libvirt_timeout`` seconds.
        """
        self._guests.folder(server)
        self._retry(QUIET, lambda: power.find_active(self._libvirt, server))

    def _retry(self, context: VerbContext, work: Callable[[], Answer]) -> Answer:
        """Call ``work`` until it does not raise NoAnswer, and return the result.

        ``work`` must check the present state first, because a call without an answer may have
        succeeded.

        Raises:
            NoAnswer: ``work`` still raises NoAnswer ``libvirt_timeout`` seconds after the first
                call.
            Cancelled: The verb was cancelled, and ``work`` raised NoAnswer.
        """
        deadline = time.monotonic() + self._libvirt_timeout
        while True:
            try:
                return work()
            except errors.NoAnswer:
                if context.cancelled():
                    raise Cancelled from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)


def _add_proof(
    migration: live_migration.MigrationOptions, state_dir: Path
) -> live_migration.MigrationOptions:
    if migration.tls is None:
        return migration
    return replace(migration, proof=live_migration.lay_proof(state_dir / "pki", migration.tls))
