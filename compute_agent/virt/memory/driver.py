# SPDX-License-Identifier: Apache-2.0
"""The virt driver for guests in memory. Each verb calls the module that implements the verb.

The agent uses this driver with [agent] driver = memory. Tests and the bench use it directly. All
methods are thread-safe.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from common.domain.json_types import JsonObject
from common.domain.models import (
    AttachedShare,
    AttachedVolume,
    Belongings,
    DomainState,
    GuestSpec,
    HostInventory,
    ImageRef,
    Interface,
)
from common.domain.server_facts import HostedServer, ports_of
from compute_agent.verb_context import ImageReader, ImageWriter, Part, Peer, VerbContext, VerbFailed
from compute_agent.virt.driver import SERIAL, SPICE, VNC, VolumeMerge
from compute_agent.virt.memory import (
    cold_migration,
    guest_agent,
    guests,
    images,
    interfaces,
    live_migration,
    power,
    resizes,
    shares,
    snapshots,
    volumes,
)
from compute_agent.virt.memory.state.host import MemoryHost, state_of


class MemoryDriver:
    """Implements ``virt.driver.Driver`` for one host in memory.

    Args:
        host: The host, or None for a new host with default values.
    """

    def __init__(self, host: MemoryHost | None = None) -> None:
        self.host = host or MemoryHost()

    def inventory(self) -> HostInventory:
        with self.host.call("inventory"):
            return self.host.size

    def boot_id(self) -> str:
        return self.host.boot_id

    def domains(self) -> list[DomainState]:
        with self.host.call("domains"), self.host.lock:
            return [state_of(server, guest) for server, guest in self.host.guests.items()]

    def guests_volumes(self) -> dict[str, list[str]]:
        with self.host.call("guests_volumes"), self.host.lock:
            return {
                server: [volume.volume_id for volume in guest.volumes]
                for server, guest in self.host.guests.items()
                if guest.is_active
            }

    def files_alone(self) -> list[str]:
        with self.host.call("files_alone"), self.host.lock:
            return sorted(self.host.files.keys() - self.host.guests.keys())

    def server_facts(self, server: str) -> HostedServer:
        with self.host.call("server_facts", server), self.host.lock:
            guest = self.host.guest(server)
            return replace(
                guest.facts,
                ports=ports_of(guest.interfaces),
                is_suspended=guest.saved,
                is_rescued=bool(guest.rescue),
                volumes=[volume.volume_id for volume in guest.volumes],
            )

    def ensure_image(self, image: ImageRef, read_image: ImageReader, context: VerbContext) -> None:
        with self.host.call("ensure_image", "", context):
            images.fetch(self.host, image, read_image, context)
            self.host.images.add(image.id)

    def ensure_guest(
        self, spec: GuestSpec, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        with self.host.call("ensure_guest", spec.server, context):
            return guests.make(self.host, spec, read_image, context)

    def ensure_running(
        self, server: str, fence: int, context: VerbContext, has: Belongings | None = None
    ) -> DomainState:
        with self.host.call("ensure_running", server, context):
            return power.start(self.host, server, fence, context, has)

    def ensure_stopped(
        self, server: str, fence: int, timeout: float, context: VerbContext
    ) -> DomainState:
        with self.host.call("ensure_stopped", server, context):
            return power.stop(self.host, server, fence, timeout, context)

    def pull_plug(self, server: str) -> None:
        with self.host.call("pull_plug", server):
            power.pull_plug(self.host, server)

    def reboot(
        self,
        server: str,
        fence: int,
        timeout: float,
        context: VerbContext,
        has: Belongings | None = None,
    ) -> DomainState:
        with self.host.call("reboot", server, context):
            return power.reboot(self.host, server, fence, timeout, context, has)

    def ensure_paused(self, server: str, fence: int, context: VerbContext) -> DomainState:
        with self.host.call("ensure_paused", server, context):
            return power.pause(self.host, server, fence)

    def ensure_suspended(self, server: str, fence: int, context: VerbContext) -> DomainState:
        with self.host.call("ensure_suspended", server, context):
            return power.suspend(self.host, server, fence, context)

    def rebuild(
        self,
        spec: GuestSpec,
        read_image: ImageReader,
        runs: bool,
        context: VerbContext,
        keep_ephemeral: bool = False,
    ) -> DomainState:
        with self.host.call("rebuild", spec.server, context):
            return guests.rebuild(self.host, spec, read_image, runs, context, keep_ephemeral)

    def rescue(
        self, spec: GuestSpec, image: ImageRef, read_image: ImageReader, context: VerbContext
    ) -> DomainState:
        with self.host.call("rescue", spec.server, context):
            return guests.rescue(self.host, spec, image, read_image, context)

    def unrescue(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        with self.host.call("unrescue", spec.server, context):
            return guests.unrescue(self.host, spec, context)

    def attach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        with self.host.call("attach_interface", server, context):
            return interfaces.attach(self.host, server, fence, interface, context)

    def detach_interface(
        self, server: str, fence: int, interface: Interface, context: VerbContext
    ) -> DomainState:
        with self.host.call("detach_interface", server, context):
            return interfaces.detach(self.host, server, fence, interface, context)

    def attach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> DomainState:
        with self.host.call("attach_share", server, context):
            return shares.attach(self.host, server, fence, share)

    def detach_share(
        self, server: str, fence: int, share: AttachedShare, context: VerbContext
    ) -> None:
        with self.host.call("detach_share", server, context):
            shares.detach(self.host, server, fence, share)

    def attach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        with self.host.call("attach_volume", server, context):
            return volumes.attach(self.host, server, fence, volume, context)

    def detach_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        with self.host.call("detach_volume", server, context):
            return volumes.detach(self.host, server, fence, volume, context)

    def disconnect_volumes(self, server: str, fence: int) -> None:
        with self.host.call("disconnect_volumes", server):
            volumes.disconnect(self.host, server, fence)

    def extend_volume(self, server: str, volume: AttachedVolume, context: VerbContext) -> None:
        with self.host.call("extend_volume", server, context):
            volumes.extend(self.host, server, volume)

    def copy_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        with self.host.call("copy_volume", server, context):
            return volumes.copy(self.host, server, fence, volume, context)

    def switch_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        with self.host.call("switch_volume", server, context):
            return volumes.switch(self.host, server, fence, volume)

    def snapshot_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState:
        with self.host.call("snapshot_volume", server, context):
            return volumes.snapshot(self.host, server, fence, volume, context)

    def merge_volume(
        self,
        server: str,
        fence: int,
        volume: AttachedVolume,
        merge: VolumeMerge,
        context: VerbContext,
    ) -> DomainState:
        with self.host.call("merge_volume", server, context):
            return volumes.merge(self.host, server, fence, volume, context)

    def keep_volume(
        self, server: str, fence: int, volume: AttachedVolume, context: VerbContext
    ) -> DomainState | None:
        with self.host.call("keep_volume", server, context):
            return volumes.keep(self.host, server, fence)

    def snapshot(
        self, server: str, fence: int, write_image: ImageWriter, context: VerbContext
    ) -> int:
        with self.host.call("snapshot", server, context):
            return snapshots.snapshot(self.host, server, write_image, context)

    def quiesce(self, server: str, seconds: float) -> None:
        with self.host.call("quiesce", server):
            guest_agent.quiesce(self.host, server, seconds)

    def unquiesce(self, server: str) -> None:
        with self.host.call("unquiesce", server), self.host.lock:
            if (guest := self.host.guests.get(server)) is not None:
                guest.still_until = 0.0

    def inject_nmi(self, server: str) -> None:
        with self.host.call("inject_nmi", server):
            guests.inject_nmi(self.host, server)

    def set_password(self, server: str, user: str, password: str) -> None:
        with self.host.call("set_password", server):
            guest_agent.set_password(self.host, server, user, password)

    def diagnostics(self, server: str) -> JsonObject:
        with self.host.call("diagnostics", server), self.host.lock:
            return self.host.active_guest(server).diagnostics()

    def ensure_absent(self, server: str, fence: int, keep_files: bool = False) -> None:
        with self.host.call("ensure_absent", server), self.host.lock:
            self.host.remove(server, keep_files)

    # --- Moves of a guest that is off ---
    def offer(self, server: str, fence: int, secret: str, context: VerbContext) -> JsonObject:
        with self.host.call("offer", server, context):
            return cold_migration.offer(self.host, server, secret, context)

    def parts(self, server: str, secret: str) -> list[Part]:
        with self.host.call("parts", server):
            return cold_migration.parts(self.host, server, secret)

    def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
        with self.host.call("read_part", server):
            return cold_migration.read_part(self.host, server, secret, name)

    def prepare(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        with self.host.call("prepare", spec.server, context):
            cold_migration.prepare(self.host, spec, peer, context)
            return {}

    def receive(
        self, spec: GuestSpec, peer: Peer | None, read_image: ImageReader, context: VerbContext
    ) -> JsonObject:
        with self.host.call("receive", spec.server, context):
            return cold_migration.receive(self.host, spec, peer, context)

    def install(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        with self.host.call("install", spec.server, context):
            return cold_migration.install(self.host, spec, runs, context)

    # --- Resize on the same host ---
    def resize_here(self, spec: GuestSpec, runs: bool, context: VerbContext) -> DomainState:
        with self.host.call("resize_here", spec.server, context):
            return resizes.resize(self.host, spec, runs, context)

    def settle_resize(
        self, spec: GuestSpec, back: bool, resized: int, context: VerbContext
    ) -> DomainState:
        with self.host.call("settle_resize", spec.server, context):
            return resizes.settle(self.host, spec, back, resized)

    # --- Live migration ---
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
        with self.host.call("prepare_arrival", spec.server, context):
            return live_migration.prepare(self.host, spec, peer, shared, cpu, context)

    def live_migrate(
        self, spec: GuestSpec, to: JsonObject, shared: bool, context: VerbContext
    ) -> JsonObject:
        begun = time.monotonic()
        pass_by = live_migration.progress(self.host, spec.server, shared)
        with self.host.call("live_migrate", spec.server, context, pass_by):
            size = live_migration.migrate(self.host, spec, to, shared, context, pass_by)
            return {"bytes": size, "job_seconds": time.monotonic() - begun}

    def finish_incoming(self, spec: GuestSpec, context: VerbContext) -> DomainState:
        with self.host.call("arrived", spec.server, context):
            return live_migration.finish(self.host, spec)

    def console_output(self, server: str, limit: int) -> str:
        with self.host.call("console_output", server):
            text = self.host.guest(server).console
            return text.encode()[-limit:].decode(errors="replace") if limit > 0 else ""

    def console_kinds(self, server: str) -> list[str]:
        with self.host.call("console_kinds", server), self.host.lock:
            return [VNC, *([SPICE] if self.host.active_guest(server).spice else []), SERIAL]

    def console(self, server: str, kind: str) -> socket.socket:
        with self.host.call("console", server), self.host.lock:
            if kind == SPICE and not self.host.active_guest(server).spice:
                raise VerbFailed(f"The server's guest has no {kind} console.")
            self.host.active_guest(server)
            return self.host.consoles.open(server, kind)

    def watch(self, changed: Callable[[str], None]) -> None:
        self.host.watchers.append(changed)

    def close(self) -> None:
        self.host.close()
