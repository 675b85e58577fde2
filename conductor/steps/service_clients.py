# SPDX-License-Identifier: Apache-2.0
"""The clients of the image, network, share and volume service for the conductor.

They implement ``conductor.engine.external_services``. Each is created after the process has forked.
Only the lane of the service and the pending cleanups call a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from common.clients import shares, volumes
from common.clients.identity import IdentityClient
from common.clients.image import Image
from common.clients.network_bindings import Bindings
from common.clients.own_images import OwnImages
from common.clients.shares import ShareClient
from common.clients.volumes import Attachment, Volume, VolumeClient, VolumeSnapshot
from common.domain.json_types import JsonObject
from common.domain.models import ImageRef, Interface

T = TypeVar("T")


class ImageService:
    """The client of the image service (``ImageApi``), with Kilonova's own token."""

    def __init__(self, identity: IdentityClient) -> None:
        self._images = OwnImages(identity)

    def create(self, record: JsonObject) -> None:
        self._images.ask(lambda client, token: client.create(record, token))

    def show(self, image_id: str) -> ImageRef:
        return self.look(image_id).ref

    def look(self, image_id: str) -> Image:
        return self._images.ask(lambda client, token: client.look(image_id, token))

    def delete(self, image_id: str) -> None:
        self._images.ask(lambda client, token: client.delete(image_id, token))

    def leave_empty(self, image_id: str) -> None:
        self._images.ask(lambda client, token: client.leave_empty(image_id, token))

    def find(self, filters: dict[str, str]) -> list[JsonObject]:
        images = self._images.ask(lambda client, token: client.find(filters, token))
        return sorted(images, key=lambda image: str(image.get("created_at", "")), reverse=True)


class NetworkService:
    """The client of the network service (``NetworkApi``), with Kilonova's own token."""

    def __init__(self, identity: IdentityClient, client: Bindings) -> None:
        self._identity, self._client = identity, client

    def ports(self, server: str) -> list[JsonObject]:
        return self._ask(lambda token: self._client.ports(token, device_id=server))

    def port(self, port_id: str) -> JsonObject:
        return self._ask(lambda token: self._client.port(token, port_id))

    def create(self, ports: Sequence[JsonObject]) -> list[JsonObject]:
        return self._ask(lambda token: self._client.create_ports(token, ports))

    def update(self, port_id: str, values: JsonObject) -> JsonObject:
        return self._ask(lambda token: self._client.update_port(token, port_id, values))

    def delete(self, port_id: str) -> None:
        self._ask(lambda token: self._client.delete_port(token, port_id))

    def bind_also(self, port: JsonObject, host: str) -> JsonObject | None:
        return self._ask(lambda token: self._client.bind_also(token, port, host))

    def activate(self, port_id: str, host: str) -> None:
        self._ask(lambda token: self._client.activate(token, port_id, host))

    def unbind_at(self, port_id: str, host: str) -> None:
        self._ask(lambda token: self._client.unbind_at(token, port_id, host))

    def names_guests(self) -> bool:
        return self._ask(lambda token: "dns-integration" in self._client.extensions(token))

    def described(self, ports: Sequence[JsonObject], floating: bool) -> list[Interface]:
        return self._ask(lambda token: self._client.described(token, ports, floating))

    def _ask(self, call: Callable[[str], T]) -> T:
        return self._identity.with_token(call, "The network service")


class ShareService:
    """The client of the shared file system service (``ShareApi``), with Kilonova's own token.

    Args:
        identity: Provides the token and the URL of the service.
        timeout: Seconds until the first byte of a response.
    """

    def __init__(self, identity: IdentityClient, timeout: float) -> None:
        self._identity, self._client = identity, ShareClient(identity.share_url, timeout)

    def allow(self, share_id: str, access_to: str) -> str:
        return self._identity.with_token(
            lambda token: self._client.allow(token, share_id, access_to), f"The {shares.NAME}"
        )

    def deny(self, share_id: str, access_to: str) -> None:
        self._identity.with_token(
            lambda token: self._client.deny(token, share_id, access_to), f"The {shares.NAME}"
        )


class BlockStorageService:
    """The client of the block storage service (``VolumeApi``), with Kilonova's own token.

    Args:
        identity: Provides the token and the URL of the service.
        timeout: Seconds until the first byte of a response.
    """

    def __init__(self, identity: IdentityClient, timeout: float) -> None:
        self._identity, self._client = identity, VolumeClient(identity.volume_url, timeout)

    def volume(self, volume_id: str) -> Volume:
        return self._ask(lambda token: self._client.volume(token, volume_id))

    def delete(self, volume_id: str) -> None:
        self._ask(lambda token: self._client.delete(token, volume_id))

    def reimage(self, volume_id: str, image_id: str) -> None:
        self._ask(lambda token: self._client.reimage(token, volume_id, image_id))

    def snapshot(self, snapshot_id: str) -> VolumeSnapshot:
        return self._ask(lambda token: self._client.snapshot(token, snapshot_id))

    def update_snapshot_status(self, snapshot_id: str, status: str) -> None:
        self._ask(lambda token: self._client.update_snapshot_status(token, snapshot_id, status))

    def delete_snapshot(self, snapshot_id: str) -> None:
        self._ask(lambda token: self._client.delete_snapshot(token, snapshot_id))

    def end_migration(self, volume_id: str, new_volume_id: str, failed: bool) -> str:
        return self._ask(
            lambda token: self._client.end_migration(token, volume_id, new_volume_id, failed)
        )

    def attachments(self, server: str, volume_id: str | None = None) -> list[Attachment]:
        return self._ask(lambda token: self._client.attachments(token, server, volume_id))

    def attach(
        self,
        volume_id: str,
        server: str,
        connector: JsonObject | None = None,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        return self._ask(
            lambda token: self._client.attach(token, volume_id, server, connector, mountpoint, mode)
        )

    def connect(
        self, attachment_id: str, connector: JsonObject, mountpoint: str, mode: str
    ) -> Attachment:
        return self._ask(
            lambda token: self._client.connect(token, attachment_id, connector, mountpoint, mode)
        )

    def complete(self, attachment_id: str) -> None:
        self._ask(lambda token: self._client.complete(token, attachment_id))

    def detach(self, attachment_id: str) -> None:
        self._ask(lambda token: self._client.detach(token, attachment_id))

    def _ask(self, call: Callable[[str], T]) -> T:
        return self._identity.with_token(call, f"The {volumes.NAME}")
