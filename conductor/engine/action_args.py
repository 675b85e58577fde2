# SPDX-License-Identifier: Apache-2.0
"""The arguments of actions: what was asked for, frozen into the action's row when it was accepted.

The API and the operator's commands write them. Each workflow declares the arguments that it reads
(``conductor.engine.workflow.Workflow.args``). A missing field takes its default, and an unknown
field is ignored, so that an action of the previous release is understood. Secrets are never here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.domain.json_types import JsonObject
from common.domain.models import Flavor, ImageRef
from common.domain.statuses import BlockDeviceStatus, ShareStatus


@dataclass(frozen=True, kw_only=True)
class ActionArgs:
    """What every action has."""

    was: str = ""  #: the server's vm_state when the action was accepted
    roles: list[str] = field(default_factory=list)  #: of the caller who created the server


@dataclass(frozen=True, kw_only=True)
class DestinationArgs(ActionArgs):
    """Where the server is to be placed."""

    zone: str | None = None  #: availability zone
    host: str | None = None  #: the only host that may be chosen
    forced: bool = False  #: the filters of the operator do not apply to ``host``


@dataclass(frozen=True, kw_only=True)
class NetworkArgs(ActionArgs):
    """Which interfaces the server is to get."""

    #: dicts with network or port, label, fixed_ip?, tag?
    networks: list[JsonObject] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CreateArgs(DestinationArgs, NetworkArgs):
    """Create."""


@dataclass(frozen=True, kw_only=True)
class UnshelveArgs(DestinationArgs):
    """Unshelve."""

    unpin: bool = False  #: the server's pinned availability zone counts no longer


@dataclass(frozen=True, kw_only=True)
class DetachInterfaceArgs(ActionArgs):
    """Detach an interface."""

    port: str


@dataclass(frozen=True, kw_only=True)
class SecurityGroupArgs(ActionArgs):
    """Add or remove a security group."""

    group: str  #: id at the network service
    name: str = ""  #: as the caller wrote it


@dataclass(frozen=True, kw_only=True)
class ShareArgs:
    """A share of a server."""

    uuid: str  #: of the mapping
    share_id: str
    access_to: str  #: address of the host that mounts it
    tag: str = ""
    protocol: str = ""
    export_location: str = ""
    was: ShareStatus | None = None  #: status of the mapping when it was to be detached


@dataclass(frozen=True, kw_only=True)
class ShareActionArgs(ActionArgs):
    """Attach or detach a share."""

    share: ShareArgs


@dataclass(frozen=True, kw_only=True)
class VolumeActionArgs(ActionArgs):
    """Attach, detach or extend a volume."""

    block_device: str  #: uuid of the row
    volume_id: str
    before: BlockDeviceStatus = BlockDeviceStatus.ATTACHED  #: the row's status, for the way back


@dataclass(frozen=True, kw_only=True)
class SwapVolumeArgs(VolumeActionArgs):
    """Copy a volume's data into another one while the server runs, and go on there."""

    new_volume_id: str
    new_size_gb: int


@dataclass(frozen=True, kw_only=True)
class VolumeSnapshotArgs(VolumeActionArgs):
    """The guest leaves a volume's file as it is and writes into a new one."""

    snapshot_id: str
    new_file: str


@dataclass(frozen=True, kw_only=True)
class MergeSnapshotArgs(VolumeActionArgs):
    """A file of a volume goes: ``file`` into ``into``; without ``into`` all that is between
    ``file`` (None: nothing, so that none is left) and the guest's own goes into that."""

    snapshot_id: str
    file: str | None = None
    into: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageArgs(ActionArgs):
    """Make an image of the server: snapshot, shelve."""

    image_id: str
    name: str = ""
    properties: JsonObject = field(default_factory=dict)
    #: of the volumes of a server that boots from one, at the block storage service
    snapshots: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BackupArgs(ImageArgs):
    """Backup."""

    backup_type: str
    rotation: int  #: how many backups of this type are kept


@dataclass(frozen=True, kw_only=True)
class RebuildArgs(ActionArgs):
    """Rebuild. ``before`` and ``wrote`` are there when the image is another one."""

    preserve_ephemeral: bool = False
    reimage: str | None = None  #: the image that the volume it boots from is written from
    before: JsonObject = field(default_factory=dict)  #: columns of the server as they were
    wrote: JsonObject = field(default_factory=dict)  #: the same columns as the request left them


@dataclass(frozen=True, kw_only=True)
class RescueArgs(ActionArgs):
    """Rescue."""

    image: ImageRef | None = None  #: None: the server's own


@dataclass(frozen=True, kw_only=True)
class MoveArgs(ActionArgs):
    """Resize, cold migration; what all moves have."""

    migration: str  #: uuid of the migration's record
    source: str
    old_flavor: Flavor
    new_flavor: Flavor
    dest: str | None = None  #: of a move that has ended
    host: str | None = None  #: the only destination that may be chosen
    forced: bool = False
    by: str = ""  #: the operator's command that began it


@dataclass(frozen=True, kw_only=True)
class LiveMigrateArgs(MoveArgs):
    """Live migration."""

    block_migration: bool | None = None  #: None: as the hosts' storage needs it


@dataclass(frozen=True, kw_only=True)
class EvacuateArgs(MoveArgs):
    """Evacuate."""

    stopped: bool = False  #: the server is not started at its destination
    shared: bool | None = None  #: what the caller says of the hosts' storage


@dataclass(frozen=True, kw_only=True)
class MoveEndArgs(MoveArgs):
    """Confirm or revert a resize or a cold migration."""

    before: str = ""  #: vm_state before the move
    resized: int = 0  #: fence under which the server was moved
