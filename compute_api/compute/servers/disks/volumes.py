# SPDX-License-Identifier: Apache-2.0
"""Look up the volumes of a new server with the caller's token: sizes, root image and zone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.clients import image_checks
from common.clients.image import OWN_KEYS, Image
from common.clients.volumes import AVAILABLE, Volume
from common.domain import errors
from common.domain.json_types import JsonMapping
from common.domain.models import ImageRef
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.request import Request
from compute_api.compute.servers.disks.block_devices import (
    BOOT_ORDER,
    FIELD,
    IMAGE,
    INVALID,
    OLD_FIELD,
    SNAPSHOT,
    VOLUME,
    VolumeMapping,
)
from compute_api.compute.servers.disks.volume_attachments import check_usable

#: Keys of a volume's image metadata that are not properties of the image.
_NOT_PROPERTIES = OWN_KEYS | {
    "image_id",
    "image_name",
    "signature_verified",
    image_checks.ENCRYPTED_BY,
}


@dataclass(frozen=True)
class ServerVolumes:
    """The volumes of each server of a request."""

    mappings: Sequence[VolumeMapping] = ()
    #: Volumes that existed before, by id.
    existing: dict[str, Volume] = field(default_factory=dict)
    #: Description of the image in the root volume, or None if the server boots from another disk.
    image: Image | None = None

    @property
    def root(self) -> VolumeMapping | None:
        """The volume that the server boots from, or None if the root disk is on the host."""
        return next((mapping for mapping in self.mappings if mapping.is_root), None)


def look_up(
    request: Request, mappings: Sequence[VolumeMapping], servers: int, *, boots_image: bool
) -> ServerVolumes:
    """Look up the sources and types in the mappings, and return the volumes and their root image.

    Args:
        request: The request.
        mappings: The requested volumes.
        servers: Number of servers that get such volumes.
        boots_image: Whether the request names an image, which then describes the root disk.

    Raises:
        BadRequest: A resource does not exist for the caller, or cannot be used. Or the cloud has no
            block storage service.
        Forbidden: The policy does not allow the caller to attach volumes, or hosts could not
            download an image.
        Unavailable: An external service does not answer.
    """
    if not mappings:
        return ServerVolumes()
    service = _require_service(request)
    request.require("os_compute_api:servers:create:attach_volume")
    volume_ids = [mapping.source_id for mapping in mappings if mapping.source == VOLUME]
    if servers > 1 and volume_ids:
        raise errors.BadRequest("Cannot attach one or more volumes to multiple instances")
    if len(set(volume_ids)) < len(volume_ids):
        raise errors.BadRequest(f"{FIELD}.uuid: a volume is given twice; leave one out.")
    _check_types(service, request, mappings)
    existing: dict[str, Volume] = {}
    images: dict[str, Image] = {}
    mappings = [
        _look_up_source(service, request, mapping, existing, images) for mapping in mappings
    ]
    volumes = ServerVolumes(mappings, existing)
    if volumes.root is None or boots_image:
        return volumes
    return replace(volumes, image=_describe_image(service, request, volumes.root, existing, images))


def _require_service(request: Request) -> TenantVolumes:
    if (service := request.volumes) is not None:
        return service
    if request.body["server"].get(OLD_FIELD):
        raise errors.BadRequest(
            f"{OLD_FIELD}: this cloud has no volume service; boot from an image."
        )
    raise errors.BadRequest(
        f"{FIELD}: this cloud has no volume service. Disks can be the image as local boot disk "
        "(source_type image, destination_type local), or new local disks (source_type blank, "
        "destination_type local)."
    )


def _check_types(
    service: TenantVolumes, request: Request, mappings: Sequence[VolumeMapping]
) -> None:
    """Raise BadRequest if a requested volume type does not exist for the caller."""
    requested = {mapping.volume_type for mapping in mappings if mapping.volume_type}
    if not requested:
        return
    types = service.types(request.context.token)
    names = {name for volume_type in types for name in (volume_type.id, volume_type.name)}
    for missing in sorted(requested - names):
        raise errors.BadRequest(f"Volume type {missing} could not be found.")


def _look_up_source(
    service: TenantVolumes,
    request: Request,
    mapping: VolumeMapping,
    existing: dict[str, Volume],
    images: dict[str, Image],
) -> VolumeMapping:
    """Return the mapping, and add the volume or image to ``existing`` or ``images``.

    For an existing volume the result has the size of the volume. For a snapshot without a requested
    size the result has the size of the snapshot.

    Raises:
        BadRequest: The source does not exist for the caller, or cannot be used.
        Forbidden: Hosts could not download the image.
    """
    source, token = str(mapping.source_id), request.context.token
    if mapping.source == VOLUME:
        volume = existing[source] = _read_volume(service, token, source)
        check_usable(request, volume)
        return replace(mapping, size_gb=volume.size_gb)
    if mapping.source == SNAPSHOT:
        try:
            snapshot = service.snapshot(token, source)
        except (errors.NotFound, errors.BadRequest) as problem:
            raise errors.BadRequest(f"{INVALID}: failed to get snapshot {source}.") from problem
        if snapshot.status != AVAILABLE:
            raise errors.BadRequest(
                f"{INVALID}: snapshot {source} is {snapshot.status}, not {AVAILABLE}."
            )
        return replace(mapping, size_gb=mapping.size_gb or snapshot.size_gb)
    if mapping.source == IMAGE:
        try:
            images[source] = request.image(source)
        except (errors.NotFound, errors.BadRequest) as problem:
            raise errors.BadRequest(f"{INVALID}: failed to get image {source}.") from problem
    return mapping


def _read_volume(service: TenantVolumes, token: str, volume_id: str) -> Volume:
    try:
        return service.volume(token, volume_id)
    except (errors.NotFound, errors.BadRequest) as problem:
        raise errors.BadRequest(f"{INVALID}: failed to get volume {volume_id}.") from problem


def _describe_image(
    service: TenantVolumes,
    request: Request,
    root: VolumeMapping,
    existing: dict[str, Volume],
    images: dict[str, Image],
) -> Image:
    """Return the image in the root volume, without an id.

    This is the image from which the volume is created, or else is built from the metadata of the
    existing volume or of the snapshot's volume.

    Raises:
        BadRequest: The volume is not bootable or has no source, or the image is not active.
    """
    if root.source == IMAGE:
        image = images[str(root.source_id)]
        # Later checks cannot name the image, because the id is removed here.
        image_checks.check_active(image)
        return replace(image, ref=replace(image.ref, id=""))
    if root.source not in (VOLUME, SNAPSHOT):
        raise errors.BadRequest(
            f"{BOOT_ORDER} {FIELD}.boot_index: servers cannot boot from a disk of source_type "
            "blank; give -1."
        )
    token = request.context.token
    if root.source == VOLUME:
        volume = existing[str(root.source_id)]
    else:
        snapshot = service.snapshot(token, str(root.source_id))
        volume = _read_volume(service, token, snapshot.volume_id)
    if not volume.bootable:
        raise errors.BadRequest(f"Block Device {root.source_id} is not bootable.")
    metadata = volume.image_metadata
    return Image(
        ImageRef(
            "",
            "raw",
            properties={
                name: value for name, value in metadata.items() if name not in _NOT_PROPERTIES
            },
        ),
        min_ram=_parse_number(metadata, "min_ram"),
        min_disk=_parse_number(metadata, "min_disk"),
    )


def _parse_number(metadata: JsonMapping, name: str) -> int:
    """Return a number of the image metadata, or 0 if it is missing or not a number."""
    text = str(metadata.get(name) or "0")
    # The first 18 digits of a longer number are more than any flavor or volume has.
    return int(text.lstrip("0")[:18] or 0) if text.isascii() and text.isdecimal() else 0


def choose_zone(request: Request, volumes: ServerVolumes, zone: str | None) -> str | None:
    """Return the zone of the servers: ``zone``, or if that is None the zone of existing volumes.

    If the cloud attaches volumes across zones, return ``zone`` unchanged.

    Raises:
        BadRequest: A volume is in another zone.
    """
    if request.services.settings.cross_az_attach:
        return zone
    for volume in volumes.existing.values():
        zone = zone or volume.availability_zone
        if volume.availability_zone != zone:
            raise errors.BadRequest(
                f"Invalid volume: Instance and volume {volume.id} are not in the same "
                f"availability_zone. Instance is in {zone}. Volume is in {volume.availability_zone}"
            )
    return zone
