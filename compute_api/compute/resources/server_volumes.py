# SPDX-License-Identifier: Apache-2.0
"""The volumes of a new server: looked at and made with the caller's token, so that they are the
caller's.

What is not there yet is made before the server's rows are committed, so that a quota of the block
storage service refuses the request. What was made for a server that was refused is deleted again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from common import errors, ids, image_checks
from common.clients.image import OWN_KEYS, Image
from common.clients.volumes import AVAILABLE, Volume
from common.json_types import JsonMapping, JsonObject
from common.models import Flavor, ImageRef
from common.statuses import BlockDeviceStatus
from compute_api.compute.dependencies import TenantVolumes
from compute_api.compute.request import Request
from compute_api.compute.resources import block_devices
from compute_api.compute.resources.block_devices import (
    FIELD,
    IMAGE,
    INVALID,
    OLD_FIELD,
    SNAPSHOT,
    VOLUME,
    VolumeMapping,
)
from compute_api.compute.resources.volume_attachments import check_usable

log = logging.getLogger(__name__)
GIB = 1024**3
#: How long a volume that is being made is waited for before it can be deleted again.
GIVE_UP_SECONDS, GIVE_UP_POLL_SECONDS = 10.0, 0.25
#: What a volume says of its image beside the image's properties.
_NOT_PROPERTIES = OWN_KEYS | {
    "image_id",
    "image_name",
    "signature_verified",
    image_checks.ENCRYPTED_BY,
}


@dataclass(frozen=True)
class ServerVolumes:
    """The volumes of each server of a request. image: what the volume that is booted from says,
    where there is one; names: what each is called; zone: where new ones are made."""

    mappings: Sequence[VolumeMapping] = ()
    existing: dict[str, Volume] = field(default_factory=dict)
    image: Image | None = None
    bus: str | None = None

    @property
    def root(self) -> VolumeMapping | None:
        """What the server boots from; None: a disk of its host."""
        return next((one for one in self.mappings if one.is_root), None)


def wanted(
    request: Request, mappings: Sequence[VolumeMapping], count: int, image_given: bool
) -> ServerVolumes:
    """Look at everything that these name.

    Raises:
        BadRequest: something is not there for the caller, or cannot be had.
    """
    if not mappings:
        return ServerVolumes()
    service = request.services.volumes
    if service is None or not service.has_service():
        if request.body["server"].get(OLD_FIELD):
            raise errors.BadRequest(
                f"{OLD_FIELD}: this cloud has no volume service; boot from an image."
            )
        raise errors.BadRequest(
            f"{FIELD}: this cloud has no volume service; a disk is the image as local boot disk "
            "(source_type image, destination_type local), or a new one (source_type blank, "
            "destination_type local)."
        )
    request.require("os_compute_api:servers:create:attach_volume")
    if count > 1 and any(one.source == VOLUME for one in mappings):
        raise errors.BadRequest("Cannot attach one or more volumes to multiple instances")
    given = [one.source_id for one in mappings if one.source == VOLUME]
    if len(set(given)) < len(given):
        raise errors.BadRequest(f"{FIELD}.uuid: a server has a volume once.")
    _check_types(service, request, mappings)
    existing: dict[str, Volume] = {}
    images: dict[str, Image] = {}
    found = [_looked_at(service, request, one, existing, images) for one in mappings]
    root = next((one for one in found if one.is_root), None)
    booted = None
    if root is not None and not image_given:
        booted = _image_of(service, request, root, existing, images)
    return ServerVolumes(found, existing, booted)


def _check_types(
    service: TenantVolumes, request: Request, mappings: Sequence[VolumeMapping]
) -> None:
    asked = {one.volume_type for one in mappings if one.volume_type}
    if not asked:
        return
    known = {word for one in service.types(request.context.token) for word in (one.id, one.name)}
    for missing in sorted(asked - known):
        raise errors.BadRequest(f"Volume type {missing} could not be found.")


def _looked_at(
    service: TenantVolumes,
    request: Request,
    one: VolumeMapping,
    existing: dict[str, Volume],
    images: dict[str, Image],
) -> VolumeMapping:
    """The mapping with its size. Raises BadRequest: its source is not there, or cannot be had."""
    source, token = str(one.source_id), request.context.token
    if one.source == VOLUME:
        volume = existing[source] = _volume(service, token, source)
        check_usable(request, volume)
        return replace(one, size_gb=volume.size_gb)
    if one.source == SNAPSHOT:
        try:
            snapshot = service.snapshot(token, source)
        except (errors.NotFound, errors.BadRequest) as problem:
            raise errors.BadRequest(f"{INVALID}: failed to get snapshot {source}.") from problem
        if snapshot.status != AVAILABLE:
            raise errors.BadRequest(
                f"{INVALID}: snapshot {source} is {snapshot.status}, not {AVAILABLE}."
            )
        return replace(one, size_gb=one.size_gb or snapshot.size_gb)
    if one.source == IMAGE:
        try:
            images[source] = request.image(source)
        except (errors.NotFound, errors.BadRequest) as problem:
            raise errors.BadRequest(f"{INVALID}: failed to get image {source}.") from problem
    return one


def _volume(service: TenantVolumes, token: str, volume_id: str) -> Volume:
    try:
        return service.volume(token, volume_id)
    except (errors.NotFound, errors.BadRequest) as problem:
        raise errors.BadRequest(f"{INVALID}: failed to get volume {volume_id}.") from problem


def _image_of(
    service: TenantVolumes,
    request: Request,
    root: VolumeMapping,
    existing: dict[str, Volume],
    images: dict[str, Image],
) -> Image:
    """What is known of the system that the server boots."""
    if root.source == IMAGE:
        found = images[str(root.source_id)]
        image_checks.check_active(found)  # here, where the refusal can name the image
        return replace(found, ref=replace(found.ref, id=""))
    if root.source not in (VOLUME, SNAPSHOT):
        raise errors.BadRequest(
            f"{block_devices.BOOT_ORDER} {FIELD}.boot_index: nothing can be booted from a disk of "
            "source_type blank; give -1."
        )
    token = request.context.token
    if root.source == VOLUME:
        volume = existing[str(root.source_id)]
    else:
        volume = _volume(service, token, service.snapshot(token, str(root.source_id)).volume_id)
    if not volume.bootable:
        raise errors.BadRequest(f"Block Device {root.source_id} is not bootable.")
    said = volume.image_metadata
    return Image(
        ImageRef(
            "",
            "raw",
            properties={key: value for key, value in said.items() if key not in _NOT_PROPERTIES},
        ),
        min_ram=_number(said, "min_ram"),
        min_disk=_number(said, "min_disk"),
    )


def _number(said: JsonMapping, name: str) -> int:
    text = str(said.get(name) or "0")
    # The first 18 digits of a longer number are more than any flavor or volume has, too.
    return int(text.lstrip("0")[:18] or 0) if text.isascii() and text.isdecimal() else 0


def check_image(image: Image, flavor: Flavor, root: VolumeMapping) -> None:
    """Can what the volume holds run in this flavor? Raises BadRequest."""
    image_checks.check_active(image)
    image_checks.check_flavor(image, replace(flavor, root_gb=0))
    if root.size_gb < image.min_disk:
        raise errors.BadRequest(
            "Volume is smaller than the minimum size specified in image metadata. Volume size is "
            f"{root.size_gb * GIB} bytes, minimum size is {image.min_disk * GIB} bytes."
        )


def zone_of(request: Request, found: ServerVolumes, zone: str | None) -> str | None:
    """The zone of a server that may have volumes of its own zone only; elsewhere as it was asked
    for. Raises BadRequest: a volume is in another one."""
    if request.services.settings.cross_az_attach:
        return zone
    for volume in found.existing.values():
        zone = zone or volume.availability_zone
        if volume.availability_zone != zone:
            raise errors.BadRequest(
                f"Invalid volume: Instance and volume {volume.id} are not in the same "
                f"availability_zone. Instance is in {zone}. Volume is in {volume.availability_zone}"
            )
    return zone


def _refuse_encrypted(one: VolumeMapping, made: Volume | None) -> None:
    """Raises BadRequest: the type of the new volume, or of what it is made of, is encrypted."""
    if made is not None and made.encrypted:
        source = f"{one.source} {one.source_id}" if one.source_id else one.source
        raise errors.BadRequest(
            f"{INVALID}: a volume of source_type {source} is encrypted there (its type is "
            f"{made.volume_type or 'not known'}), which no host of this cloud can open; ask for a "
            "volume_type without encryption, or for another source."
        )


@dataclass
class NewVolumes:
    """The volumes that are made for the servers of one request."""

    service: TenantVolumes
    token: str = field(repr=False)
    found: ServerVolumes
    names: Sequence[str]  #: of the mappings
    root_name: str  #: what the server boots from is called
    made: list[list[str | None]] = field(default_factory=list)  #: by server, then by mapping

    def make(self, servers: int, zone: str | None) -> None:
        """Ask for those that are not there, for so many servers.

        Raises:
            Forbidden: a quota of the service does not allow them. BadRequest: it refuses.
        """
        try:
            for _ in range(servers):
                row: list[str | None] = []
                self.made.append(row)
                for one in self.found.mappings:
                    made = self._made(one, zone)
                    row.append(made.id if made is not None else None)
                    _refuse_encrypted(one, made)
        except errors.Problem as problem:
            self.give_up(0)
            if isinstance(problem, errors.TooLarge):
                raise errors.Forbidden(problem.text) from problem
            if isinstance(problem, errors.NotFound | errors.Conflict):
                raise errors.BadRequest(problem.text) from problem
            raise

    def _made(self, one: VolumeMapping, zone: str | None) -> Volume | None:
        if one.source == VOLUME:
            return None
        return self.service.create(
            self.token,
            size_gb=one.size_gb,
            image_id=one.source_id if one.source == IMAGE else None,
            snapshot_id=one.source_id if one.source == SNAPSHOT else None,
            volume_type=one.volume_type,
            zone=zone,
        )

    def rows(self, server_ids: Sequence[str]) -> list[JsonObject]:
        """The rows of the first servers' volumes."""
        return [
            self._row(server_id, one, name, made)
            for server_id, row in zip(server_ids, self.made, strict=False)
            for one, name, made in zip(self.found.mappings, self.names, row, strict=True)
        ]

    def _row(self, server_id: str, one: VolumeMapping, name: str, made: str | None) -> JsonObject:
        volume = self.found.existing.get(str(one.source_id))
        return {
            "uuid": ids.new(),
            "server_id": server_id,
            "volume_id": made or one.source_id,
            "status": BlockDeviceStatus.CREATING if made else BlockDeviceStatus.RESERVED,
            "source_type": one.source,
            "source_id": one.source_id if made else None,
            "volume_type": one.volume_type,
            "size_gb": one.size_gb,
            "boot_index": one.boot_index,
            "device_name": name,
            "disk_bus": one.bus or self.found.bus,
            "device_type": one.device_type,
            "tag": one.tag,
            "delete_on_termination": one.delete_on_termination,
            "read_only": volume is not None and volume.read_only,
            "multiattach": volume is not None and volume.multiattach,
        }

    def give_up(self, kept: int, pause: Callable[[float], None] = time.sleep) -> None:
        """Delete those of all but the first ``kept`` servers: nobody has them."""
        left = [made for row in self.made[kept:] for made in row if made]
        self.made = self.made[:kept]
        for _ in range(int(GIVE_UP_SECONDS / GIVE_UP_POLL_SECONDS)):
            left = self._deleted(left)
            if not left:
                return
            pause(GIVE_UP_POLL_SECONDS)
        for volume_id in left:
            log.warning(
                "volume %s was made for a server that was refused, and cannot be deleted: its owner "
                "can, later",
                volume_id,
            )

    def _deleted(self, volume_ids: Iterable[str]) -> list[str]:
        """Those that could not be deleted yet."""
        left = []
        for volume_id in volume_ids:
            try:
                self.service.delete(self.token, volume_id)
            except errors.Problem:
                left.append(volume_id)
        return left
