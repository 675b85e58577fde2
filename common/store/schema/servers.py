# SPDX-License-Identifier: Apache-2.0
"""Tables of servers, actions, guests, volumes and console tokens."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
)

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
from common.store.schema.columns import (
    NUMBERED,
    EnumColumn,
    Json,
    JsonObjectColumn,
    LongText,
    metadata,
    time_column,
    uuid_column,
)

servers = Table(
    "servers",
    metadata,
    uuid_column("id", primary_key=True),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("hostname", String(255), nullable=False),
    Column("description", String(255)),
    # state and fence
    Column("fence", BigInteger, nullable=False, server_default="1"),
    # The running action.
    uuid_column("action"),
    Column("vm_state", String(32), nullable=False),
    Column("task_state", String(32)),
    Column("power_state", Integer, nullable=False, server_default="0"),
    Column("progress", Integer, nullable=False, server_default="0"),
    Column("fault", Json),  # {code, message, details, created (µs)}
    Column("locked", Boolean, nullable=False, server_default="0"),
    Column("locked_by", String(16)),
    Column("locked_reason", String(255)),
    # where
    Column("host", String(255)),
    Column("availability_zone", String(255)),
    Column("pinned_availability_zone", String(255)),
    # contents
    uuid_column("image_id"),
    Column("image", Json),  # ImageRef as frozen at creation
    Column("flavor", Json, nullable=False),  # Flavor as frozen at creation
    Column("flavor_id", String(255), nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("disk_gb", Integer, nullable=False),
    Column("key_name", String(255)),
    Column("key_data", Text),
    Column("user_data", LongText),
    Column("config_drive", Boolean, nullable=False, server_default="0"),
    Column("meta", Json, nullable=False),
    Column("tags", Json, nullable=False),  # sorted list
    Column("scheduler_hints", Json, nullable=False),
    Column("security_groups", Json, nullable=False),
    Column("trusted_image_certificates", Json),
    Column("access_ip_v4", String(39)),
    Column("access_ip_v6", String(39)),
    Column("disk_config", String(8), nullable=False, server_default="MANUAL"),
    Column("root_device_name", String(255)),
    Column("reservation_id", String(32), nullable=False),
    Column("launch_index", Integer, nullable=False, server_default="0"),
    # times. deleted is 1 after the end of the server for its tenant.
    Column("deleted", Integer, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    time_column("launched_at"),
    time_column("terminated_at"),
    time_column("deleted_at"),
    uuid_column("shelved_image_id"),
    time_column("shelved_at"),
    time_column("soft_deleted_at"),
    # List of models.Interface, or NULL.
    Column("interfaces", Json),
    # Stored by the guest, encrypted with the key of the server's owner.
    Column("password", Text),
    # Requested disks besides the root disk, see local_disks.
    Column("disks", Json),
    Column("shares", Integer, nullable=False, server_default="0"),  # rows of share_mappings
    Column("volumes", Integer, nullable=False, server_default="0"),  # rows of block_devices
    Index("ix_servers_list", "project_id", "deleted", "created_at", "id"),
    # The lists of all projects, with and without a filter, each in the default order.
    Index("ix_servers_all", "deleted", "created_at", "id"),
    Index("ix_servers_user", "user_id", "deleted", "created_at", "id"),
    Index("ix_servers_image", "image_id", "deleted", "created_at", "id"),
    Index("ix_servers_flavor", "flavor_id", "deleted", "created_at", "id"),
    Index("ix_servers_state", "vm_state", "deleted", "created_at", "id"),
    Index("ix_servers_quota", "project_id", "deleted", "user_id", "vcpus", "memory_mb"),
    Index("ix_servers_host", "host", "deleted"),
    Index("ix_servers_changed", "updated_at"),
    Index("ix_servers_reservation", "reservation_id"),
    Index("ix_servers_shelved", "vm_state", "shelved_at"),
    Index("ix_servers_soft_deleted", "vm_state", "soft_deleted_at"),
)

actions = Table(
    "actions",
    metadata,
    uuid_column("id", primary_key=True),
    uuid_column("server_id", nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("request_id", String(64), nullable=False),
    # The name in os-instance-actions.
    Column("name", String(64), nullable=False),
    Column("workflow", String(32), nullable=False),
    # Version of the workflow. Older conductors skip the action.
    Column("version", Integer, nullable=False),
    Column("args", Json, nullable=False),  # frozen facts of the request
    # Encrypted. NULL after the end of the action.
    Column("secrets", LongText),
    Column("fence", BigInteger, nullable=False),
    # The state of the action.
    Column("state", EnumColumn(ActionState, 16), nullable=False),
    Column("phase", EnumColumn(ActionPhase, 8), nullable=False, server_default=ActionPhase.FORWARD),
    Column("step", String(32)),
    Column("attempt", Integer, nullable=False, server_default="1"),
    # Data of the steps.
    Column("data", Json, nullable=False),
    # Host of the running command.
    Column("host", String(255)),
    # Time of the running command.
    time_column("sent_at"),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("owner", String(64)),
    time_column("lease_until"),
    # Time of the next look by a conductor. NULL after the end.
    time_column("due_at"),
    Column("next_seq", Integer, nullable=False, server_default="1"),
    Column("message", Text),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    time_column("finished_at"),
    # Unexpected failures in a row.
    Column("failures", Integer, nullable=False, server_default="0"),
    # Cause of the last failure, for the operator.
    Column("cause", Text),
    # Verb of the running command.
    Column("verb", String(32)),
    Index("ix_actions_due", "due_at"),
    Index("ix_actions_host", "host", "state"),
    Index("ix_actions_state", "state", "host"),
    Index("ix_actions_server", "server_id", "created_at"),
    Index("ix_actions_request", "request_id"),
)

events = Table(
    "events",
    metadata,
    uuid_column("action_id", primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("step", String(32), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("event", EnumColumn(StepEvent, 16), nullable=False),
    Column("host", String(255)),
    Column("message", Text),  # safe for the tenant
    Column("details", Text),  # for the operator
    time_column("at", nullable=False),
)

guests = Table(
    "guests",
    metadata,
    uuid_column("server_id", primary_key=True),
    Column("host", String(255), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("wanted", EnumColumn(GuestState, 8), nullable=False),
    Column("may_run", Boolean, nullable=False),
    time_column("changed_at", nullable=False),
    # Time of the last command to remove the guest.
    time_column("sent_at"),
    # models.HardwareAssignment, or NULL.
    Column("assignment", Json),
    # The migration that holds the allocation. NULL: the server.
    uuid_column("holder"),
    # Another host's guest uses the files.
    Column("keeps_files", Boolean, nullable=False, server_default="0"),
    Index("ix_guests_host", "host", "wanted"),
    Index("ix_guests_wanted", "wanted", "host"),
)

# --- servers that move ---
migrations = Table(
    "migrations",
    metadata,
    Column("id", Integer, primary_key=True),
    uuid_column("uuid", nullable=False, unique=True),
    uuid_column("server_id", nullable=False),
    # The action of the move, not of a confirm or revert.
    uuid_column("action_id", nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("type", EnumColumn(MigrationType, 16), nullable=False),
    Column("status", EnumColumn(MigrationStatus, 16), nullable=False),
    Column("source_host", String(255)),
    Column("dest_host", String(255)),
    Column("old_flavor", Json, nullable=False),
    Column("new_flavor", Json, nullable=False),
    Column("was", String(32), nullable=False),  # the server's vm_state before
    Column("requested_control", EnumColumn(Control, 16)),
    Column("progress", JsonObjectColumn),  # bytes: memory_total, memory_processed …
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    Index("ix_migrations_server", "server_id", "status"),
    Index("ix_migrations_status", "status", "updated_at"),
    Index("ix_migrations_action", "action_id"),
    Index("ix_migrations_page", "created_at", "id"),
    Index("ix_migrations_project", "project_id", "created_at"),
    **NUMBERED,
)

# --- shares of servers ---
share_mappings = Table(
    "share_mappings",
    metadata,
    uuid_column("uuid", primary_key=True),
    uuid_column("server_id", nullable=False),
    uuid_column("share_id", nullable=False),
    # Tag for the mount in the guest.
    Column("tag", String(255), nullable=False),
    Column("status", EnumColumn(ShareStatus, 16), nullable=False),
    # NFS.
    Column("protocol", String(16), nullable=False),
    Column("export_location", Text, nullable=False),
    # Address of the server's host, which may mount the share.
    Column("access_to", String(64), nullable=False),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    UniqueConstraint("server_id", "share_id"),
    UniqueConstraint("server_id", "tag"),
    Index("ix_share_mappings_share", "share_id", "access_to"),
)

# --- volumes ---
block_devices = Table(
    "block_devices",
    metadata,
    uuid_column("uuid", primary_key=True),
    uuid_column("server_id", nullable=False),
    # NULL until the volume is created.
    uuid_column("volume_id"),
    Column("status", EnumColumn(BlockDeviceStatus, 16), nullable=False),
    uuid_column("attachment_id"),
    # The service's connection for the server's host, encrypted.
    Column("connection", LongText),
    Column("source_type", String(16), nullable=False),  # volume, image, snapshot, blank
    # Id of the source image or snapshot.
    uuid_column("source_id"),
    # Requested type.
    Column("volume_type", String(255)),
    # NULL: unknown.
    Column("size_gb", Integer),
    Column("boot_index", Integer),
    Column("device_name", String(255), nullable=False),
    Column("disk_bus", String(16)),
    Column("device_type", String(16)),
    Column("tag", String(255)),
    Column("delete_on_termination", Boolean, nullable=False, server_default="0"),
    Column("read_only", Boolean, nullable=False, server_default="0"),
    Column("multiattach", Boolean, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    UniqueConstraint("server_id", "volume_id"),
    UniqueConstraint("server_id", "device_name"),
    Index("ix_block_devices_volume", "volume_id"),
)

# --- consoles ---
console_tokens = Table(
    "console_tokens",
    metadata,
    # SHA-256 of the token. The token is not stored.
    Column("hash", String(64), primary_key=True),
    uuid_column("server_id", nullable=False),
    Column("host", String(255), nullable=False),
    # Fence of the guest record. Another guest needs another token.
    Column("fence", BigInteger, nullable=False),
    Column("kind", String(16), nullable=False),  # novnc, serial, spice-html5 …
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    time_column("created_at", nullable=False),
    time_column("expires_at", nullable=False, index=True),
    time_column("used_at"),
    # The user's token, encrypted.
    Column("caller", LongText),
    # SHA-256 of the browser's cookie. NULL: any browser or program.
    Column("browser", String(64)),
    Index("ix_console_tokens_server", "server_id"),
)
