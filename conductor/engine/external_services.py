# SPDX-License-Identifier: Apache-2.0
"""What the conductor asks of others: messages, images, networks, shares, volumes. The seams that
``conductor.engine.engine.Engine`` has.

``conductor.steps.service_clients`` and ``conductor.service`` implement them for the process. Each
call of the image, network, share and volume service is made as Kilonova's own user. It raises
Unavailable when the service does not answer, and another Problem when the service refuses for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.clients.image import Image
from common.clients.volumes import Attachment, Volume, VolumeSnapshot
from common.domain.json_types import JsonObject
from common.domain.models import Command, ImageRef, Interface, RequestSpec, Selection


class Messaging(Protocol):
    """Messages to schedulers and hosts; any of them may be lost."""

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Ask a scheduler; raises NoAnswer."""

    def do(self, host: str, commands: list[Command]) -> None:
        """Send commands to a host."""

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        """Tell a host to fetch these images ahead."""


class ImageApi(Protocol):
    """The image service. Each call may be repeated."""

    def create(self, record: JsonObject) -> None:
        """Make an image record under the id it names; one that is there already is fine."""

    def show(self, image_id: str) -> ImageRef:
        """The image as it is now."""

    def look(self, image_id: str) -> Image:
        """The same, with all that its use depends on."""

    def delete(self, image_id: str) -> None:
        """Remove an image; one that is gone is fine."""

    def leave_empty(self, image_id: str) -> None:
        """Make an image whole that has no bytes; one that is so already is fine."""

    def find(self, filters: dict[str, str]) -> list[JsonObject]:
        """Images with these properties, newest first."""


class NetworkApi(Protocol):
    """The network service. Ports are dicts as the service writes them."""

    def ports(self, server: str) -> list[JsonObject]:
        """The ports of a server."""

    def port(self, port_id: str) -> JsonObject:
        """One port; NotFound when it is gone."""

    def create(self, ports: Sequence[JsonObject]) -> list[JsonObject]:
        """Make ports, all or none. Not repeatable: look first whether they are there."""

    def update(self, port_id: str, values: JsonObject) -> JsonObject:
        """Change a port; NotFound when it is gone."""

    def delete(self, port_id: str) -> None:
        """Remove a port; one that is gone is fine."""

    def bind_also(self, port: JsonObject, host: str) -> JsonObject | None:
        """Bind a port (the whole of it) to this host too, inactively. The binding, with vif_type
        and vif_details; None where the service knows one host a port. NotFound when the port is
        gone."""

    def activate(self, port_id: str, host: str) -> None:
        """Make the binding to this host the active one; NotFound when it is gone."""

    def unbind_at(self, port_id: str, host: str) -> None:
        """Remove the inactive binding to this host; one that is gone is fine, the active one
        stays."""

    def names_guests(self) -> bool:
        """Does the service know ports by names, which guests resolve?"""

    def described(self, ports: Sequence[JsonObject], floating: bool) -> list[Interface]:
        """These ports with what their networks and subnets say; ``floating``: also which floating
        IPs lead to them, which none does to a port that was just made."""


class ShareApi(Protocol):
    """The shared file system service."""

    def allow(self, share_id: str, access_to: str) -> str:
        """Let an address mount a share; what is so already stays. The state of that rule: active,
        error or another."""

    def deny(self, share_id: str, access_to: str) -> None:
        """Remove that rule; one that is gone is fine."""


class VolumeApi(Protocol):
    """The block storage service. Each call but ``attach`` may be repeated."""

    def volume(self, volume_id: str) -> Volume:
        """A volume as it is now; NotFound when it is gone."""

    def delete(self, volume_id: str) -> None:
        """Delete a volume that is attached to nothing; one that is gone is fine."""

    def reimage(self, volume_id: str, image_id: str) -> None:
        """Have a volume that is reserved written anew from an image. Look first whether it is being
        written already."""

    def snapshot(self, snapshot_id: str) -> VolumeSnapshot:
        """A snapshot as it is now; NotFound when it is gone."""

    def update_snapshot_status(self, snapshot_id: str, status: str) -> None:
        """What a host has made of a snapshot that it takes or deletes for the service; BadRequest
        when the service does not wait for that."""

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Delete a snapshot; one that is gone is fine."""

    def end_migration(self, volume_id: str, new_volume_id: str, failed: bool) -> str:
        """A migrating volume has its data in the new one, or where it was, and the other one goes;
        the id of what stays. Not repeatable: look first whether it migrates still."""

    def attachments(self, server: str, volume_id: str | None = None) -> list[Attachment]:
        """A server's, or those that it has of one volume."""

    def attach(
        self,
        volume_id: str,
        server: str,
        connector: JsonObject | None = None,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        """Reserve a volume for a server, or let the host of the connector have it at once. Not
        repeatable: look first whether it is reserved."""

    def connect(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        """Let the host of the connector have the volume; NotFound when the attachment is gone."""

    def complete(self, attachment_id: str) -> None:
        """The server has the volume: it is in use; NotFound when the attachment is gone."""

    def detach(self, attachment_id: str) -> None:
        """End an attachment; one that is gone is fine."""
