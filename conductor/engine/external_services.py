# SPDX-License-Identifier: Apache-2.0
"""The interfaces through which the conductor calls schedulers, agents and external services.

``conductor.engine.engine.Engine`` has one client of each. ``conductor.steps.service_clients`` and
``conductor.service`` implement them for the process. Calls of the image, network, share and volume
service use Kilonova's own user. They raise Unavailable if the service does not answer, and another
Problem for a definite refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.clients.image import Image
from common.clients.volumes import Attachment, Volume, VolumeSnapshot
from common.domain.json_types import JsonObject
from common.domain.models import Command, ImageRef, Interface, RequestSpec, Selection


class Messaging(Protocol):
    """Messages to schedulers and hosts. Any of them may be lost."""

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Request proposed hosts for each server from a scheduler.

        Args:
            specs: The requirements of each server.
            fresh: True if the scheduler must read the hosts again after it receives the request.

        Returns:
            A selection for each spec. Without a suitable host, the selection contains the reasons.

        Raises:
            NoAnswer: No scheduler answers.
        """

    def do(self, host: str, commands: list[Command]) -> None:
        """Send commands to a host, without waiting for their results."""

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        """Send a host the request to fetch images before a server needs them."""


class ImageApi(Protocol):
    """The image service. Each call may be repeated."""

    def create(self, record: JsonObject) -> None:
        """Create an image record under the id in ``record``. An identical record is no error.

        Raises:
            Conflict: An image with other values has the id.
        """

    def show(self, image_id: str) -> ImageRef:
        """Return the part of the image's record that servers store.

        Raises:
            NotFound: The image does not exist.
        """

    def look(self, image_id: str) -> Image:
        """Return the image: the part that servers store, and the fields that steps check.

        Raises:
            NotFound: The image does not exist.
        """

    def delete(self, image_id: str) -> None:
        """Delete an image. A missing image is no error."""

    def leave_empty(self, image_id: str) -> None:
        """Store empty data, so that the image becomes active.

        An image that is already active and empty is no error.
        """

    def find(self, filters: dict[str, str]) -> list[JsonObject]:
        """Return the records of the images with these fields and properties, newest first."""


class NetworkApi(Protocol):
    """The network service. Ports are dicts in the service's format."""

    def ports(self, server: str) -> list[JsonObject]:
        """Return the ports whose ``device_id`` is this server."""

    def port(self, port_id: str) -> JsonObject:
        """Return a port.

        Raises:
            NotFound: The port does not exist.
        """

    def create(self, ports: Sequence[JsonObject]) -> list[JsonObject]:
        """Create ports, all or none, and return them.

        Not repeatable: the caller first looks for ports of an earlier try.
        """

    def update(self, port_id: str, values: JsonObject) -> JsonObject:
        """Change fields of a port, and return the changed port.

        Raises:
            NotFound: The port does not exist.
        """

    def delete(self, port_id: str) -> None:
        """Delete a port. A missing port is no error."""

    def bind_also(self, port: JsonObject, host: str) -> JsonObject | None:
        """Add an inactive binding to a host, beside the active binding of the port.

        Args:
            port: The port, with all fields of the service's record.
            host: The host of the new binding.

        Returns:
            The new binding, or the existing binding to this host, which may be active, with
            vif_type and vif_details. The vif_type is "binding_failed" if the host cannot bind the
            port. None without a change if the service binds a port to one host only.

        Raises:
            NotFound: The port does not exist.
        """

    def activate(self, port_id: str, host: str) -> None:
        """Make the binding to a host the active binding. An active binding is no error.

        If the service binds a port to one host only, bind the port to this host instead.

        Raises:
            NotFound: The port or the binding does not exist.
        """

    def unbind_at(self, port_id: str, host: str) -> None:
        """Remove the inactive binding to a host. An active binding stays.

        A missing binding or port is no error.
        """

    def names_guests(self) -> bool:
        """Return True if the service sets DNS names for ports (extension dns-integration)."""

    def described(self, ports: Sequence[JsonObject], floating: bool) -> list[Interface]:
        """Return the ports as interfaces, with data of their networks and subnets.

        Args:
            ports: The ports. The result has their order.
            floating: True to read floating IPs too. New ports have none.
        """


class ShareApi(Protocol):
    """The shared file system service."""

    def allow(self, share_id: str, access_to: str) -> str:
        """Create the rule that lets an address mount a share, unless the rule exists.

        Returns:
            The state of the rule: active, error or another state of Manila. If the state shows that
            Manila still deletes an older rule, no rule was created.
        """

    def deny(self, share_id: str, access_to: str) -> None:
        """Start to delete the rules that let an address mount a share.

        A missing rule or share is no error.
        """


class VolumeApi(Protocol):
    """The block storage service. Calls may be repeated, unless the method excludes that."""

    def volume(self, volume_id: str) -> Volume:
        """Return a volume.

        Raises:
            NotFound: The volume does not exist.
        """

    def delete(self, volume_id: str) -> None:
        """Start to delete a volume without attachments. A missing volume is no error."""

    def reimage(self, volume_id: str, image_id: str) -> None:
        """Start to overwrite a reserved volume with an image.

        The volume has the status ``downloading`` until the service is done. Not repeatable: the
        caller first checks this status.
        """

    def snapshot(self, snapshot_id: str) -> VolumeSnapshot:
        """Return a snapshot.

        Raises:
            NotFound: The snapshot does not exist.
        """

    def update_snapshot_status(self, snapshot_id: str, status: str) -> None:
        """Report to the service how the creation or deletion of a snapshot on a host has ended.

        Args:
            snapshot_id: The snapshot.
            status: ``creating`` or ``deleting`` after success. The service then continues.
                ``error`` or ``error_deleting`` after a failure.

        Raises:
            BadRequest: The service does not wait for the report.
        """

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Start to delete a snapshot. A missing snapshot, or a running deletion, is no error."""

    def end_migration(self, volume_id: str, new_volume_id: str, failed: bool) -> str:
        """Complete or cancel the migration of a volume. The service deletes the other volume.

        Not repeatable: the caller first checks whether the volume is still migrating.

        Args:
            volume_id: The volume with the old data.
            new_volume_id: The volume with the copy.
            failed: True to cancel the migration, which keeps the old data.

        Returns:
            The id of the remaining volume.
        """

    def attachments(self, server: str, volume_id: str | None = None) -> list[Attachment]:
        """Return the attachments of a server, or only those of one volume."""

    def attach(
        self,
        volume_id: str,
        server: str,
        connector: JsonObject | None = None,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        """Reserve a volume for a server, or let the connector's host use the volume at once.

        Not repeatable: the caller first checks whether the volume is reserved.

        Args:
            volume_id: Id of the volume.
            server: Id of the server.
            connector: Description of the host to connect, or None to reserve only.
            mountpoint: Device name in the guest. Ignored without ``connector``.
            mode: "rw" or "ro". None: the service decides. Ignored without ``connector``.

        Returns:
            The new attachment, with a connector also the data that the host needs to connect.
        """

    def connect(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        """Let the connector's host use the volume, and return the attachment with the connection.

        Args:
            attachment_id: Id of the attachment, a reservation or a connected attachment.
            connector: Description of the host.
            mountpoint: Device name in the guest.
            mode: "rw" or "ro".

        Raises:
            NotFound: The attachment does not exist.
        """

    def complete(self, attachment_id: str) -> None:
        """Complete an attachment: the service marks the volume as in use by the server.

        Raises:
            NotFound: The attachment does not exist.
        """

    def detach(self, attachment_id: str) -> None:
        """Delete an attachment. A missing attachment is no error."""
