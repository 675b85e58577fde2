# SPDX-License-Identifier: Apache-2.0
"""Create, phase 2: look up the resources that the body names.

The database is read in one transaction, external services with the caller's token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.clients.image import Image
from common.domain import errors, hardware
from common.domain.models import Flavor
from common.store.engine import Connection
from common.store.rows import KeypairRow
from common.store.tenants import flavors, keypairs, server_groups
from compute_api.compute.request.request import Request
from compute_api.compute.servers import destinations
from compute_api.compute.servers.create.body import RequestedServers
from compute_api.compute.servers.destinations import Destination
from compute_api.compute.servers.disks import volumes as server_volumes
from compute_api.compute.servers.disks.block_devices import OF_IMAGE
from compute_api.compute.servers.disks.volumes import ServerVolumes


@dataclass(frozen=True)
class NamedRows:
    """The rows of the database that the body of a create names."""

    flavor: Flavor
    key: KeypairRow | None
    destination: Destination


@dataclass(frozen=True)
class NamedResources(NamedRows):
    """All resources that the body of a create names."""

    volumes: ServerVolumes
    #: The image that the servers boot, or the description of the image in the root volume.
    image: Image


def look_up(request: Request, requested: RequestedServers) -> NamedResources:
    """Read the resources that the request names.

    Raises:
        BadRequest: A resource does not exist for the caller, or cannot be used.
        Forbidden: The caller may not attach volumes, or hosts could not download the image.
        Unavailable: An external service does not answer.
    """
    rows = request.read(_read_rows, request, requested)
    devices = requested.devices
    volumes = server_volumes.look_up(
        request, devices.volumes, requested.max_count, boots_image=bool(devices.image_id)
    )
    image = volumes.image or _read_image(request, devices.image_id)
    zone = server_volumes.choose_zone(request, volumes, rows.destination.zone)
    return NamedResources(
        rows.flavor, rows.key, replace(rows.destination, zone=zone), volumes, image
    )


def _read_rows(tx: Connection, request: Request, requested: RequestedServers) -> NamedRows:
    settings, context = request.services.settings, request.context
    flavor = read_flavor(tx, request, requested.flavor_id)
    if requested.group_id is not None:
        try:
            server_groups.show(tx, requested.group_id, context.project_id)
        except errors.NotFound as problem:
            raise errors.BadRequest(problem.text) from problem
    key = None
    if key_name := request.body["server"].get("key_name"):
        try:
            key = keypairs.show(tx, context.user_id, key_name)
        except errors.NotFound as problem:
            raise errors.BadRequest("Invalid key_name provided.") from problem
    return NamedRows(
        flavor, key, destinations.resolve(tx, requested.destination, settings.default_zone)
    )


def read_flavor(tx: Connection, request: Request, flavor_id: str) -> Flavor:
    """Read a flavor that the caller may use, with its PCI aliases resolved.

    Raises:
        BadRequest: The flavor does not exist for the caller, or its PCI aliases are malformed or
            not configured.
    """
    try:
        row = flavors.show(tx, flavor_id, request.scope)
    except errors.NotFound as problem:
        raise errors.BadRequest(problem.text) from problem
    return hardware.with_aliases(flavors.record(row), request.services.settings.pci_aliases)


def _read_image(request: Request, image_id: str) -> Image:
    """Return the image without the properties that name block devices."""
    image = request.image(image_id)
    properties = {
        name: value for name, value in image.ref.properties.items() if name not in OF_IMAGE
    }
    return replace(image, ref=replace(image.ref, properties=properties))
