# SPDX-License-Identifier: Apache-2.0
"""The first database: servers, actions, guests, hosts, placement, quotas, groups."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None

LONG_TEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
BIG_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create every table."""
    _projects()
    _quotas()
    _keypairs()
    _idempotency_keys()
    _flavors()
    _flavor_access()
    _servers()
    _actions()
    _events()
    _guests()
    _services()
    _heartbeats()
    _hosts()
    _providers()
    _inventories()
    _provider_traits()
    _consumers()
    _allocations()
    _aggregates()
    _aggregate_hosts()
    _server_groups()
    _server_group_members()


def _projects() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("quota_seq", sa.BigInteger(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
    )


def _quotas() -> None:
    op.create_table(
        "quotas",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False, server_default=""),
        sa.Column("resource", sa.String(64), nullable=False),
        sa.Column("hard_limit", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "user_id", "resource", name="pk_quotas"),
    )


def _keypairs() -> None:
    op.create_table(
        "keypairs",
        sa.Column("id", BIG_KEY, autoincrement=True, nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("type", sa.String(16), nullable=False, server_default="ssh"),
        sa.Column("fingerprint", sa.String(255), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_keypairs"),
        sa.UniqueConstraint("user_id", "name", name="uq_keypairs_user_id_name"),
    )


def _idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("reservation_id", sa.String(32), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "key", name="pk_idempotency_keys"),
    )


def _flavors() -> None:
    op.create_table(
        "flavors",
        sa.Column("id", BIG_KEY, autoincrement=True, nullable=False),
        sa.Column("flavorid", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("vcpus", sa.Integer(), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("root_gb", sa.Integer(), nullable=False),
        sa.Column("ephemeral_gb", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("swap_mb", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("rxtx_factor", sa.Float(), nullable=False, server_default="1"),
        sa.Column("is_public", sa.Boolean(), nullable=False),
        sa.Column("description", sa.Text()),
        sa.Column("extra_specs", LONG_TEXT, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_flavors"),
        sa.UniqueConstraint("flavorid", name="uq_flavors_flavorid"),
        sa.UniqueConstraint("name", name="uq_flavors_name"),
    )


def _flavor_access() -> None:
    op.create_table(
        "flavor_access",
        sa.Column("flavor_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("flavor_id", "project_id", name="pk_flavor_access"),
    )


def _servers() -> None:
    op.create_table(
        "servers",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("hostname", sa.String(255), nullable=False),
        sa.Column("description", sa.String(255)),
        sa.Column("fence", sa.BigInteger(), nullable=False, server_default="1"),
        sa.Column("action", sa.String(36)),
        sa.Column("vm_state", sa.String(32), nullable=False),
        sa.Column("task_state", sa.String(32)),
        sa.Column("power_state", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("progress", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("fault", LONG_TEXT),
        sa.Column("locked", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("locked_by", sa.String(16)),
        sa.Column("locked_reason", sa.String(255)),
        sa.Column("host", sa.String(255)),
        sa.Column("availability_zone", sa.String(255)),
        sa.Column("pinned_availability_zone", sa.String(255)),
        sa.Column("image_id", sa.String(36)),
        sa.Column("image", LONG_TEXT),
        sa.Column("flavor", LONG_TEXT, nullable=False),
        sa.Column("flavor_id", sa.String(255), nullable=False),
        sa.Column("vcpus", sa.Integer(), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("disk_gb", sa.Integer(), nullable=False),
        sa.Column("key_name", sa.String(255)),
        sa.Column("key_data", sa.Text()),
        sa.Column("user_data", LONG_TEXT),
        sa.Column("config_drive", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("meta", LONG_TEXT, nullable=False),
        sa.Column("tags", LONG_TEXT, nullable=False),
        sa.Column("scheduler_hints", LONG_TEXT, nullable=False),
        sa.Column("security_groups", LONG_TEXT, nullable=False),
        sa.Column("trusted_image_certificates", LONG_TEXT),
        sa.Column("access_ip_v4", sa.String(39)),
        sa.Column("access_ip_v6", sa.String(39)),
        sa.Column("disk_config", sa.String(8), nullable=False, server_default="MANUAL"),
        sa.Column("root_device_name", sa.String(255)),
        sa.Column("reservation_id", sa.String(32), nullable=False),
        sa.Column("launch_index", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("deleted", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("launched_at", sa.BigInteger()),
        sa.Column("terminated_at", sa.BigInteger()),
        sa.Column("deleted_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_servers"),
    )
    op.create_index("ix_servers_all", "servers", ["deleted", "created_at", "id"])
    op.create_index("ix_servers_changed", "servers", ["updated_at"])
    op.create_index("ix_servers_host", "servers", ["host", "deleted"])
    op.create_index("ix_servers_list", "servers", ["project_id", "deleted", "created_at", "id"])
    op.create_index(
        "ix_servers_quota", "servers", ["project_id", "deleted", "user_id", "vcpus", "memory_mb"]
    )
    op.create_index("ix_servers_reservation", "servers", ["reservation_id"])


def _actions() -> None:
    op.create_table(
        "actions",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("workflow", sa.String(32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("args", LONG_TEXT, nullable=False),
        sa.Column("secrets", LONG_TEXT),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("phase", sa.String(8), nullable=False, server_default="do"),
        sa.Column("step", sa.String(32)),
        sa.Column("attempt", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("data", LONG_TEXT, nullable=False),
        sa.Column("host", sa.String(255)),
        sa.Column("sent_at", sa.BigInteger()),
        sa.Column("sends", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until", sa.BigInteger()),
        sa.Column("due_at", sa.BigInteger()),
        sa.Column("next_seq", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("message", sa.Text()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_actions"),
    )
    op.create_index("ix_actions_due", "actions", ["due_at"])
    op.create_index("ix_actions_host", "actions", ["host", "state"])
    op.create_index("ix_actions_server", "actions", ["server_id", "created_at"])


def _events() -> None:
    op.create_table(
        "events",
        sa.Column("action_id", sa.String(36), nullable=False),
        sa.Column("seq", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.String(32), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(16), nullable=False),
        sa.Column("host", sa.String(255)),
        sa.Column("message", sa.Text()),
        sa.Column("details", sa.Text()),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("action_id", "seq", name="pk_events"),
    )


def _guests() -> None:
    op.create_table(
        "guests",
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("wanted", sa.String(8), nullable=False),
        sa.Column("may_run", sa.Boolean(), nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.Column("sent_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("server_id", "host", name="pk_guests"),
    )
    op.create_index("ix_guests_host", "guests", ["host", "wanted"])


def _services() -> None:
    op.create_table(
        "services",
        sa.Column("id", BIG_KEY, autoincrement=True, nullable=False),
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("binary", sa.String(64), nullable=False),
        sa.Column("disabled", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("disabled_reason", sa.String(255)),
        sa.Column("forced_down", sa.Boolean(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_services"),
        sa.UniqueConstraint("host", "binary", name="uq_services_host_binary"),
        sa.UniqueConstraint("uuid", name="uq_services_uuid"),
    )


def _heartbeats() -> None:
    op.create_table(
        "heartbeats",
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("binary", sa.String(64), nullable=False),
        sa.Column("seen_at", sa.BigInteger(), nullable=False),
        sa.Column("up", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("host", "binary", name="pk_heartbeats"),
    )


def _hosts() -> None:
    op.create_table(
        "hosts",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("session", sa.BigInteger(), nullable=False),
        sa.Column("boot_id", sa.String(64), nullable=False, server_default=""),
        sa.Column("hypervisor_type", sa.String(64), nullable=False),
        sa.Column("hypervisor_version", sa.BigInteger(), nullable=False),
        sa.Column("hypervisor_hostname", sa.String(255), nullable=False),
        sa.Column("host_ip", sa.String(64), nullable=False),
        sa.Column("cpu_info", LONG_TEXT, nullable=False),
        sa.Column("traits", LONG_TEXT, nullable=False),
        sa.Column("booted_at", sa.BigInteger()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_hosts"),
    )


def _providers() -> None:
    op.create_table(
        "providers",
        sa.Column("id", BIG_KEY, autoincrement=True, nullable=False),
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("parent_uuid", sa.String(36)),
        sa.Column("root_uuid", sa.String(36), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_providers"),
        sa.UniqueConstraint("host", name="uq_providers_host"),
        sa.UniqueConstraint("name", name="uq_providers_name"),
        sa.UniqueConstraint("uuid", name="uq_providers_uuid"),
    )
    op.create_index("ix_providers_changed", "providers", ["changed_at"])


def _inventories() -> None:
    op.create_table(
        "inventories",
        sa.Column("provider_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("resource_class", sa.String(255), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("reserved", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("min_unit", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("max_unit", sa.Integer(), nullable=False, server_default="2147483647"),
        sa.Column("step_size", sa.Integer(), nullable=False, server_default="1"),
        sa.Column("allocation_ratio", sa.Float(), nullable=False, server_default="1"),
        sa.PrimaryKeyConstraint("provider_id", "resource_class", name="pk_inventories"),
    )


def _provider_traits() -> None:
    op.create_table(
        "provider_traits",
        sa.Column("provider_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("trait", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("provider_id", "trait", name="pk_provider_traits"),
    )


def _consumers() -> None:
    op.create_table(
        "consumers",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("type", sa.String(16), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_consumers"),
    )


def _allocations() -> None:
    op.create_table(
        "allocations",
        sa.Column("provider_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("consumer_id", sa.String(36), nullable=False),
        sa.Column("resource_class", sa.String(255), nullable=False),
        sa.Column("used", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint(
            "provider_id", "consumer_id", "resource_class", name="pk_allocations"
        ),
    )
    op.create_index("ix_allocations_consumer", "allocations", ["consumer_id"])
    op.create_index(
        "ix_allocations_usage", "allocations", ["provider_id", "resource_class", "used"]
    )


def _aggregates() -> None:
    op.create_table(
        "aggregates",
        sa.Column("id", BIG_KEY, autoincrement=True, nullable=False),
        sa.Column("uuid", sa.String(36), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("meta", LONG_TEXT, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_aggregates"),
        sa.UniqueConstraint("name", name="uq_aggregates_name"),
        sa.UniqueConstraint("uuid", name="uq_aggregates_uuid"),
    )


def _aggregate_hosts() -> None:
    op.create_table(
        "aggregate_hosts",
        sa.Column("aggregate_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("aggregate_id", "host", name="pk_aggregate_hosts"),
    )
    op.create_index("ix_aggregate_hosts_host", "aggregate_hosts", ["host"])


def _server_groups() -> None:
    op.create_table(
        "server_groups",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("user_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("policy", sa.String(32), nullable=False),
        sa.Column("rules", LONG_TEXT, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_server_groups"),
    )
    op.create_index("ix_server_groups_project_id", "server_groups", ["project_id"])


def _server_group_members() -> None:
    op.create_table(
        "server_group_members",
        sa.Column("group_id", sa.String(36), nullable=False),
        sa.Column("server_id", sa.String(36), nullable=False),
        sa.PrimaryKeyConstraint("group_id", "server_id", name="pk_server_group_members"),
    )
    op.create_index("ix_server_group_members_server", "server_group_members", ["server_id"])
