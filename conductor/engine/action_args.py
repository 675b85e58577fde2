# SPDX-License-Identifier: Apache-2.0
"""The arguments of actions, stored in the action's row when the request is accepted.

The API and operator commands write them. Each workflow declares its arguments
(``conductor.engine.workflow.Workflow.args``). A missing field takes its default, and an unknown
field is ignored, so that this release can continue an action of the previous one. Secrets are never
stored here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.domain.json_types import JsonObject
from common.domain.models import Flavor, ImageRef
from common.domain.statuses import BlockDeviceStatus, ShareStatus


@dataclass(frozen=True, kw_only=True)
class ActionArgs:
    """Arguments of every action."""

    #: The server's vm_state when the action was accepted.
    was: str = ""
    #: Roles of the user that created the server.
    roles: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class DestinationArgs(ActionArgs):
    """Requirements for the server's new host."""

    #: Availability zone.
    zone: str | None = None
    #: The only host that may be chosen.
    host: str | None = None
    #: True if the operator's filters do not apply to ``host``.
    forced: bool = False


@dataclass(frozen=True, kw_only=True)
class NetworkArgs(ActionArgs):
    """The requested interfaces."""

    #: Dicts with network or port, label, and optionally fixed_ip and tag.
    networks: list[JsonObject] = field(default_factory=list)
    security_groups: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CreateArgs(DestinationArgs, NetworkArgs):
    """Arguments of a create."""


@dataclass(frozen=True, kw_only=True)
class UnshelveArgs(DestinationArgs):
    """Arguments of an unshelve."""

    #: True if the server's pinned availability zone no longer applies.
    unpin: bool = False


@dataclass(frozen=True, kw_only=True)
class DetachInterfaceArgs(ActionArgs):
    """Arguments of an interface's detach."""

    port: str


@dataclass(frozen=True, kw_only=True)
class SecurityGroupArgs(ActionArgs):
    """Arguments of adding or removing a security group."""

    #: Id at the network service.
    group: str
    #: The name or id in the request.
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class ShareArgs:
    """A share of a server."""

    #: Id of the mapping between the server and the share.
    uuid: str
    share_id: str
    #: Address of the host that mounts the share.
    access_to: str
    tag: str = ""
    protocol: str = ""
    export_location: str = ""
    #: Status of the mapping before its detach.
    was: ShareStatus | None = None


@dataclass(frozen=True, kw_only=True)
class ShareActionArgs(ActionArgs):
    """Arguments of a share's attach or detach."""

    share: ShareArgs


@dataclass(frozen=True, kw_only=True)
class VolumeActionArgs(ActionArgs):
    """Arguments of a volume's attach, detach or extend."""

    #: The uuid of the volume's row.
    block_device: str
    volume_id: str
    #: The row's status before the action, for the undo.
    before: BlockDeviceStatus = BlockDeviceStatus.ATTACHED


@dataclass(frozen=True, kw_only=True)
class SwapVolumeArgs(VolumeActionArgs):
    """Arguments of a swap: copy a volume to another while the server runs, then use the other."""

    new_volume_id: str
    new_size_gb: int


@dataclass(frozen=True, kw_only=True)
class VolumeSnapshotArgs(VolumeActionArgs):
    """Arguments of a volume snapshot: the guest writes to a new file from here on."""

    snapshot_id: str
    new_file: str


@dataclass(frozen=True, kw_only=True)
class MergeSnapshotArgs(VolumeActionArgs):
    """Arguments of a snapshot's delete: merge files of the volume.

    With ``into``, ``file`` is merged into that file. Without, all files between ``file`` and the
    guest's active file are merged into the active file. If ``file`` is None too, only the active
    file remains.
    """

    snapshot_id: str
    file: str | None = None
    into: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageArgs(ActionArgs):
    """Arguments of actions that create an image of the server: snapshot and shelve."""

    image_id: str
    name: str = ""
    properties: JsonObject = field(default_factory=dict)
    #: Ids of volume snapshots at the block storage service, for a server that boots from a volume.
    snapshots: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BackupArgs(ImageArgs):
    """Arguments of a backup."""

    backup_type: str
    #: Number of backups of this type to keep.
    rotation: int


@dataclass(frozen=True, kw_only=True)
class RebuildArgs(ActionArgs):
    """Arguments of a rebuild.

    ``before`` and ``wrote`` are set only if the request changes the image.
    """

    preserve_ephemeral: bool = False
    #: The image that overwrites the boot volume.
    reimage: str | None = None
    #: Columns of the server before the request.
    before: JsonObject = field(default_factory=dict)
    #: The same columns after the request.
    wrote: JsonObject = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RescueArgs(ActionArgs):
    """Arguments of a rescue."""

    #: The rescue image. None: the server's own image.
    image: ImageRef | None = None


@dataclass(frozen=True, kw_only=True)
class MoveArgs(ActionArgs):
    """Arguments of all moves, and of resize and cold migration."""

    #: The uuid of the migration's record.
    migration: str
    source: str
    old_flavor: Flavor
    new_flavor: Flavor
    #: The destination of a completed move.
    dest: str | None = None
    #: The only destination that may be chosen.
    host: str | None = None
    forced: bool = False
    #: The operator's command that began the move.
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class LiveMigrateArgs(MoveArgs):
    """Arguments of a live migration."""

    #: True if disks are copied. None: decided by the storage of the hosts.
    block_migration: bool | None = None


@dataclass(frozen=True, kw_only=True)
class EvacuateArgs(MoveArgs):
    """Arguments of an evacuation."""

    #: True if the server stays off at the destination.
    stopped: bool = False
    #: The caller's statement that both hosts share storage. None: no statement.
    shared: bool | None = None


@dataclass(frozen=True, kw_only=True)
class MoveEndArgs(MoveArgs):
    """Arguments of the confirm or revert of a move."""

    #: The vm_state before the move.
    before: str = ""
    #: The fence of the move.
    resized: int = 0
