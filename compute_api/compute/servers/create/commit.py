# SPDX-License-Identifier: Apache-2.0
"""Create, phase 5: commit the rows.

New volumes are created before the commit, with the caller's token, so that the caller owns them and
a quota of the volume service refuses the request. If the request certainly fails, turns out to
repeat an earlier request, or gets fewer servers, the unused volumes are deleted again. If the
result of the commit is unknown, the volumes stay.
"""

from __future__ import annotations

import secrets
import string
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from common.clients.volumes import Volume
from common.domain import errors, hardware, ids
from common.service.log import get_logger
from common.store.engine import Connection
from common.store.tenants import quotas
from compute_api.compute.request.creation import Created, Creation
from compute_api.compute.request.dependencies import TenantVolumes
from compute_api.compute.request.request import Request
from compute_api.compute.servers.create.idempotency import IdempotentBody
from compute_api.compute.servers.create.rows import NewServers, build_rows, build_volume_rows
from compute_api.compute.servers.disks.block_devices import (
    IMAGE,
    INVALID,
    SNAPSHOT,
    VOLUME,
    VolumeMapping,
)

log = get_logger(__name__)
#: How long to retry the deletion of a volume, which fails while the volume is being created.
DELETE_SECONDS, DELETE_POLL_SECONDS = 10.0, 0.25


def commit(request: Request, new_servers: NewServers, identity: IdempotentBody) -> Created:
    """Create the new volumes, commit the rows of the servers, and return the result.

    If the quota does not allow max_count servers, fewer are created. New volumes that no server
    uses are deleted again.

    Raises:
        OverQuota: The quota allows fewer than min_count servers.
        Forbidden: A quota or the policy of the volume service refuses a new volume.
        BadRequest: The volume service refuses a new volume for another reason, a new volume is
            encrypted, or the server group does not exist any more.
        Conflict: An earlier request used the Idempotency-Key with another body.
        NotImplementedHere: There are files, and this cloud has no key to encrypt them.
        Unavailable: An external service or the database does not answer. After an error of the
            database the servers may exist, so the volumes stay.
    """
    mappings, service = new_servers.volumes.mappings, request.services.volumes
    if not mappings:
        return _commit_rows(request, new_servers, identity, [])
    # The phase lookup has used the service for these mappings.
    assert service is not None
    new_servers = replace(
        new_servers, max_count=request.read(_count_within_quota, request, new_servers)
    )
    volumes = NewVolumes(service, request.context.token, mappings)
    any_zone = request.services.settings.cross_az_attach
    volumes.create(
        new_servers.max_count, None if any_zone else new_servers.columns["pinned_availability_zone"]
    )
    try:
        created = _commit_rows(request, new_servers, identity, volumes.ids)
    except errors.Unavailable:
        raise  # The servers may exist, so keep their volumes.
    except errors.Problem:
        volumes.delete_unused(0)
        raise
    volumes.delete_unused(created.count)
    return created


def _count_within_quota(tx: Connection, request: Request, new_servers: NewServers) -> int:
    """Return the number of servers that the quota allows, at most max_count.

    The limit for members of a server group is not counted here, but in the commit.

    Raises:
        OverQuota: The quota allows fewer than min_count servers.
    """
    limits = request.services.quota.source(request.context.project_id)(tx)
    account = quotas.Account(tx, request.context.project_id, limits)
    size = quotas.Size(
        1, new_servers.flavor.vcpus, new_servers.flavor.memory_mb, _list_resources(new_servers)
    )
    return account.room(request.context.user_id, size, new_servers.min_count, new_servers.max_count)


def _list_resources(new_servers: NewServers) -> dict[str, int]:
    return hardware.resources_of(new_servers.flavor, new_servers.columns["image"])


def _commit_rows(
    request: Request,
    new_servers: NewServers,
    identity: IdempotentBody,
    volume_ids: list[list[str | None]],
) -> Created:
    reservation_id = "r-" + "".join(
        secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8)
    )
    # All ids are made once, because the transaction may run several times.
    row_ids = [(ids.new(), ids.new()) for _ in range(new_servers.max_count)]
    password = identity.password(row_ids[0][0])
    return request.services.creator.create(
        Creation(
            project_id=request.context.project_id,
            user_id=request.context.user_id,
            vcpus=new_servers.flavor.vcpus,
            memory_mb=new_servers.flavor.memory_mb,
            min_count=new_servers.min_count,
            max_count=new_servers.max_count,
            reservation_id=reservation_id,
            rows=lambda count: build_rows(
                request, new_servers, reservation_id, row_ids[:count], password
            ),
            volumes=lambda count: [
                row
                for (server_id, _), new_ids in zip(row_ids[:count], volume_ids, strict=False)
                for row in build_volume_rows(new_servers.volumes, server_id, new_ids)
            ],
            key=identity.key,
            digest=identity.digests[0],
            older_digests=identity.digests[1:],
            group=new_servers.group_id,
            limits=request.services.quota.source(request.context.project_id),
            classes=_list_resources(new_servers),
        )
    )


@dataclass
class NewVolumes:
    """The volumes that are created for the servers of one request."""

    service: TenantVolumes
    token: str = field(repr=False)
    mappings: Iterable[VolumeMapping]
    #: Ids by server, then by mapping. None for a volume that existed before.
    ids: list[list[str | None]] = field(default_factory=list)

    def create(self, servers: int, zone: str | None) -> None:
        """Start to create the new volumes of ``servers`` servers, and add their ids to ``ids``.

        After an error, delete these volumes again.

        Args:
            servers: Number of servers.
            zone: Zone of the volumes, or None for the default of the block storage service.

        Raises:
            Forbidden: A quota or the policy of the volume service refuses a volume.
            BadRequest: The volume service refuses a volume for another reason, or a new volume is
                encrypted.
            Unavailable: The volume service does not answer.
        """
        try:
            for _ in range(servers):
                server_ids: list[str | None] = []
                self.ids.append(server_ids)
                for mapping in self.mappings:
                    volume = self._create_volume(mapping, zone)
                    server_ids.append(volume.id if volume is not None else None)
                    _refuse_encrypted(mapping, volume)
        except errors.Problem as problem:
            self.delete_unused(0)
            if isinstance(problem, errors.TooLarge):
                raise errors.Forbidden(problem.text) from problem
            if isinstance(problem, errors.NotFound | errors.Conflict):
                raise errors.BadRequest(problem.text) from problem
            raise

    def _create_volume(self, mapping: VolumeMapping, zone: str | None) -> Volume | None:
        """Start to create and return a mapping's volume, or return None for an existing volume."""
        if mapping.source == VOLUME:
            return None
        return self.service.create(
            self.token,
            size_gb=mapping.size_gb,
            image_id=mapping.source_id if mapping.source == IMAGE else None,
            snapshot_id=mapping.source_id if mapping.source == SNAPSHOT else None,
            volume_type=mapping.volume_type,
            zone=zone,
        )

    def delete_unused(self, servers: int, pause: Callable[[float], None] = time.sleep) -> None:
        """Delete the new volumes of all servers after the first ``servers`` servers.

        A deletion that fails is retried for ``DELETE_SECONDS``, then logged.

        Args:
            servers: Number of servers that keep their volumes.
            pause: Sleeps for a number of seconds.
        """
        volume_ids = [
            volume_id for row in self.ids[servers:] for volume_id in row if volume_id is not None
        ]
        self.ids = self.ids[:servers]
        for _ in range(int(DELETE_SECONDS / DELETE_POLL_SECONDS)):
            volume_ids = [volume_id for volume_id in volume_ids if not self._is_deleted(volume_id)]
            if not volume_ids:
                return
            pause(DELETE_POLL_SECONDS)
        for volume_id in volume_ids:
            log.warning(
                "a volume was created for a server that was refused, and cannot be deleted yet: "
                "its owner can delete it later",
                volume=volume_id,
            )

    def _is_deleted(self, volume_id: str) -> bool:
        try:
            self.service.delete(self.token, volume_id)
        except errors.Problem:
            return False
        return True


def _refuse_encrypted(mapping: VolumeMapping, volume: Volume | None) -> None:
    """Raise BadRequest if ``volume``, which was just created for this mapping, is encrypted.

    The encryption comes from the type of the volume or from its source. None means that the mapping
    uses an existing volume, which is not checked here.
    """
    if volume is not None and volume.encrypted:
        source = f"{mapping.source} {mapping.source_id}" if mapping.source_id else mapping.source
        raise errors.BadRequest(
            f"{INVALID}: a new volume of source_type {source} is encrypted (volume type "
            f"{volume.volume_type or 'unknown'}), and hosts of this cloud cannot open encrypted "
            "volumes. Choose a volume_type without encryption, or another source."
        )
