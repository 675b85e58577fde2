# SPDX-License-Identifier: Apache-2.0
"""Rows of servers, actions, guests, volumes and console tokens."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import RowMapping

from common.domain.json_types import JsonObject
from common.domain.models import Control
from common.domain.statuses import (
    ActionPhase,
    ActionState,
    BlockDeviceStatus,
    GuestState,
    MigrationStatus,
    MigrationType,
    ShareStatus,
    StepEvent,
)


class ServerRow(Protocol):
    """A row of ``servers``."""

    id: str
    project_id: str
    user_id: str
    name: str
    hostname: str
    description: str | None
    fence: int
    action: str | None
    vm_state: str
    task_state: str | None
    power_state: int
    progress: int
    fault: JsonObject | None
    locked: bool
    locked_by: str | None
    locked_reason: str | None
    host: str | None
    availability_zone: str | None
    pinned_availability_zone: str | None
    image_id: str | None
    image: JsonObject | None
    flavor: JsonObject
    flavor_id: str
    vcpus: int
    memory_mb: int
    disk_gb: int
    key_name: str | None
    key_data: str | None
    user_data: str | None
    config_drive: bool
    meta: dict[str, str]
    tags: list[str]
    scheduler_hints: JsonObject
    security_groups: list[JsonObject]
    trusted_image_certificates: list[str] | None
    access_ip_v4: str | None
    access_ip_v6: str | None
    disk_config: str
    root_device_name: str | None
    reservation_id: str
    launch_index: int
    deleted: int
    created_at: int
    updated_at: int
    launched_at: int | None
    terminated_at: int | None
    deleted_at: int | None
    shelved_image_id: str | None
    shelved_at: int | None
    soft_deleted_at: int | None
    interfaces: list[JsonObject] | None
    password: str | None
    disks: JsonObject | None
    shares: int
    volumes: int


class PlacedServerRow(ServerRow, Protocol):
    """A server with its guest's hardware assignment (models.HardwareAssignment), mostly None."""

    assignment: JsonObject | None


class ServerState(Protocol):
    """The columns that decide whether an action may take the server."""

    project_id: str
    user_id: str
    fence: int
    action: str | None
    vm_state: str
    task_state: str | None
    locked: bool
    locked_by: str | None
    host: str | None
    launched_at: int | None
    shares: int
    volumes: int


class ServerKey(Protocol):
    """Id and project of a server."""

    id: str
    project_id: str


class ServerPlace(Protocol):
    """Host and interfaces of a server."""

    id: str
    host: str | None
    interfaces: list[JsonObject] | None


class ServerRecord(Protocol):
    """A server as ``common.store.servers.servers`` reads it for the API, with JSON as text."""

    id: str
    project_id: str
    user_id: str
    name: str
    hostname: str
    description: str | None
    # state and fence
    fence: int
    #: the running action
    action: str | None
    vm_state: str
    task_state: str | None
    power_state: int
    progress: int
    fault: str | None  #: JSON: code, message, details, created
    locked: bool
    locked_by: str | None
    locked_reason: str | None
    # place
    host: str | None
    availability_zone: str | None
    pinned_availability_zone: str | None
    # contents
    image_id: str | None
    image: str | None  #: JSON: models.ImageRef
    flavor: str  #: JSON: models.Flavor
    flavor_id: str
    vcpus: int
    memory_mb: int
    disk_gb: int
    key_name: str | None
    config_drive: bool
    meta: str  #: JSON: a mapping of texts
    tags: str  #: JSON: a sorted list
    scheduler_hints: str  #: JSON
    security_groups: str  #: JSON: a list of names
    trusted_image_certificates: str | None
    access_ip_v4: str | None
    access_ip_v6: str | None
    disk_config: str
    root_device_name: str | None
    reservation_id: str
    launch_index: int
    interfaces: str | None  #: JSON: a list of models.Interface
    #: stored by the guest
    password: str | None
    #: JSON: the requested disks besides the root disk
    disks: str | None
    shares: int
    volumes: int
    # times in µs
    deleted: int
    created_at: int
    updated_at: int
    launched_at: int | None
    terminated_at: int | None
    # long columns, not in lists
    user_data: str | None
    key_data: str | None


class ShownServerRecord(ServerRecord, Protocol):
    """A server that ``servers.show`` read, with its group."""

    group_id: str | None


class ServerFacts(Protocol):
    """The data for a guest's metadata, and both hosts of a running move (None: no move)."""

    id: str
    name: str
    hostname: str
    project_id: str
    availability_zone: str | None
    launch_index: int
    meta: dict[str, str]
    key_name: str | None
    key_data: str | None
    flavor: JsonObject
    image: JsonObject | None
    config_drive: bool
    user_data: str | None
    interfaces: list[JsonObject] | None
    security_groups: list[JsonObject]
    reservation_id: str
    root_device_name: str | None
    fence: int
    password: str | None
    disks: JsonObject | None
    volumes: int
    host: str | None
    source_host: str | None
    dest_host: str | None
    updated_at: int
    volumes_updated_at: int | None


class ActionRow(Protocol):
    """A row of ``actions``."""

    id: str
    server_id: str
    project_id: str
    user_id: str
    request_id: str
    name: str
    workflow: str
    version: int
    args: JsonObject
    secrets: str | None
    fence: int
    state: ActionState
    phase: ActionPhase
    step: str | None
    attempt: int
    data: JsonObject
    host: str | None
    sent_at: int | None
    sends: int
    owner: str | None
    lease_until: int | None
    due_at: int | None
    next_seq: int
    message: str | None
    created_at: int
    updated_at: int
    finished_at: int | None
    failures: int
    cause: str | None
    verb: str | None

    @property
    def _mapping(self) -> RowMapping: ...


class LockedActionRow(ActionRow, Protocol):
    """An action with the time of its lock."""

    locked_at: int


class LostActionRow(ActionRow, Protocol):
    """An action whose command is at a host that is down. ``dead``: the host is forced down."""

    dead: bool


class ReadingActionRow(ActionRow, Protocol):
    """An action of a move, with the source host, from which the action's command reads files."""

    source: str | None


class ActionInHandRow(ActionRow, Protocol):
    """An action with its server's name and states (None: deleted), and whether it is overdue."""

    server: str | None
    vm_state: str | None
    task_state: str | None
    overdue: bool


class EventRow(Protocol):
    """A row of ``events``."""

    action_id: str
    seq: int
    step: str
    attempt: int
    event: StepEvent
    host: str | None
    message: str | None
    details: str | None
    at: int


class GuestRow(Protocol):
    """A row of ``guests``."""

    server_id: str
    host: str
    fence: int
    wanted: GuestState
    may_run: bool
    changed_at: int
    sent_at: int | None
    assignment: JsonObject | None
    holder: str | None
    keeps_files: bool


class RemovalRow(GuestRow, Protocol):
    """A pending cleanup of a guest, and whether its host can be reached."""

    up: bool


class MigrationRow(Protocol):
    """A row of ``migrations``."""

    id: int
    uuid: str
    server_id: str
    action_id: str
    project_id: str
    user_id: str
    type: MigrationType
    status: MigrationStatus
    source_host: str | None
    dest_host: str | None
    old_flavor: JsonObject
    new_flavor: JsonObject
    was: str
    requested_control: Control | None
    progress: JsonObject | None
    created_at: int
    updated_at: int


class ShownMigrationRow(MigrationRow, Protocol):
    """A migration with the reported data of its hosts."""

    source_node: str | None
    dest_node: str | None
    dest_ip: str | None


class RequestedControl(Protocol):
    """A requested control of a live migration."""

    action_id: str
    requested_control: Control


class ShareMappingRow(Protocol):
    """A row of ``share_mappings``."""

    uuid: str
    server_id: str
    share_id: str
    tag: str
    status: ShareStatus
    protocol: str
    export_location: str
    access_to: str
    created_at: int
    updated_at: int


class BlockDeviceRow(Protocol):
    """A row of ``block_devices``."""

    uuid: str
    server_id: str
    volume_id: str | None
    status: BlockDeviceStatus
    attachment_id: str | None
    connection: str | None
    source_type: str
    source_id: str | None
    volume_type: str | None
    size_gb: int | None
    boot_index: int | None
    device_name: str
    disk_bus: str | None
    device_type: str | None
    tag: str | None
    delete_on_termination: bool
    read_only: bool
    multiattach: bool
    created_at: int
    updated_at: int


class ConsoleTokenRow(Protocol):
    """A row of ``console_tokens``."""

    hash: str
    server_id: str
    host: str
    fence: int
    kind: str
    project_id: str
    user_id: str
    created_at: int
    expires_at: int
    used_at: int | None
    caller: str | None
    browser: str | None
