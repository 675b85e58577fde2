# SPDX-License-Identifier: Apache-2.0
"""All tables. Read by the modules of this package and by the upgrades; nobody else sees SQL.

Times are microseconds since the epoch by the database's clock. JSON columns hold what is only ever read
and written whole. There are no foreign keys on rows that are locked often: a child insert would lock its
parent and deadlock with the lock order; ``doctor`` checks the references instead.
"""
from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

metadata = MetaData(naming_convention={
    "ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s"})

LongText = Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
BigKey = BigInteger().with_variant(Integer(), "sqlite")


class Json(TypeDecorator[Any]):
    """A JSON document kept as text, the same on every database."""

    impl = LongText
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"), ensure_ascii=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def _uuid(name: str, **more: Any) -> Column[str]:
    return Column(name, String(36), **more)


def _time(name: str, **more: Any) -> Column[int]:
    return Column(name, BigInteger, **more)


# --- tenants ---
projects = Table(
    "projects", metadata,
    Column("id", String(64), primary_key=True),
    Column("quota_seq", BigInteger, nullable=False, server_default="0"))   # locked by every counted change

quotas = Table(
    "quotas", metadata,
    Column("project_id", String(64), primary_key=True),       # '*' holds the class "default"
    Column("user_id", String(64), primary_key=True, server_default=""),
    Column("resource", String(64), primary_key=True),
    Column("hard_limit", Integer, nullable=False))

keypairs = Table(
    "keypairs", metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("type", String(16), nullable=False, server_default="ssh"),
    Column("fingerprint", String(255), nullable=False),
    Column("public_key", Text, nullable=False),
    _time("created_at", nullable=False),
    UniqueConstraint("user_id", "name"))

idempotency_keys = Table(
    "idempotency_keys", metadata,
    Column("project_id", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("digest", String(64), nullable=False),             # of the body: the same key with another body is an error
    Column("reservation_id", String(32), nullable=False),
    _uuid("server_id", nullable=False),
    _time("created_at", nullable=False))

# --- sizes ---
flavors = Table(
    "flavors", metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    Column("flavorid", String(255), nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("root_gb", Integer, nullable=False),
    Column("ephemeral_gb", Integer, nullable=False, server_default="0"),
    Column("swap_mb", Integer, nullable=False, server_default="0"),
    Column("rxtx_factor", Float, nullable=False, server_default="1"),
    Column("is_public", Boolean, nullable=False),
    Column("description", Text),
    Column("extra_specs", Json, nullable=False),
    _time("created_at", nullable=False))

flavor_access = Table(
    "flavor_access", metadata,
    Column("flavor_id", BigInteger, primary_key=True, autoincrement=False),
    Column("project_id", String(64), primary_key=True))

# --- servers and what is done to them ---
servers = Table(
    "servers", metadata,
    _uuid("id", primary_key=True),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("hostname", String(255), nullable=False),
    Column("description", String(255)),
    # who may change it, and its state
    Column("fence", BigInteger, nullable=False, server_default="1"),
    _uuid("action"),                                          # the action that holds it
    Column("vm_state", String(32), nullable=False),
    Column("task_state", String(32)),
    Column("power_state", Integer, nullable=False, server_default="0"),
    Column("progress", Integer, nullable=False, server_default="0"),
    Column("fault", Json),                                    # {code, message, details, created (µs)}
    Column("locked", Boolean, nullable=False, server_default="0"),
    Column("locked_by", String(16)),
    Column("locked_reason", String(255)),
    # where
    Column("host", String(255)),
    Column("availability_zone", String(255)),
    Column("pinned_availability_zone", String(255)),
    # what it is made of
    _uuid("image_id"),
    Column("image", Json),                                    # ImageRef as frozen at creation
    Column("flavor", Json, nullable=False),                   # Flavor as frozen at creation
    Column("flavor_id", String(255), nullable=False),
    Column("vcpus", Integer, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("disk_gb", Integer, nullable=False),
    Column("key_name", String(255)),
    Column("key_data", Text),
    Column("user_data", LongText),
    Column("config_drive", Boolean, nullable=False, server_default="0"),
    Column("meta", Json, nullable=False),
    Column("tags", Json, nullable=False),                     # sorted list
    Column("scheduler_hints", Json, nullable=False),
    Column("security_groups", Json, nullable=False),
    Column("trusted_image_certificates", Json),
    Column("access_ip_v4", String(39)),
    Column("access_ip_v6", String(39)),
    Column("disk_config", String(8), nullable=False, server_default="MANUAL"),
    Column("root_device_name", String(255)),
    Column("reservation_id", String(32), nullable=False),
    Column("launch_index", Integer, nullable=False, server_default="0"),
    # when; deleted is 0, or 1 once the server is gone for its tenant
    Column("deleted", Integer, nullable=False, server_default="0"),
    _time("created_at", nullable=False),
    _time("updated_at", nullable=False),
    _time("launched_at"),
    _time("terminated_at"),
    _time("deleted_at"),
    # added by 0002
    _uuid("shelved_image_id"),
    _time("shelved_at"),
    _time("soft_deleted_at"),
    # added by 0003
    Column("interfaces", Json),                               # of models.Interface; NULL: none
    Column("password", Text),                                 # what the guest posted, encrypted by its owner's key
    Index("ix_servers_list", "project_id", "deleted", "created_at", "id"),
    Index("ix_servers_all", "deleted", "created_at", "id"),
    Index("ix_servers_quota", "project_id", "deleted", "user_id", "vcpus", "memory_mb"),
    Index("ix_servers_host", "host", "deleted"),
    Index("ix_servers_changed", "updated_at"),
    Index("ix_servers_reservation", "reservation_id"),
    Index("ix_servers_shelved_at", "shelved_at"),             # these two since 0002: mostly NULL
    Index("ix_servers_soft_deleted_at", "soft_deleted_at"))

actions = Table(
    "actions", metadata,
    _uuid("id", primary_key=True),
    _uuid("server_id", nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("name", String(64), nullable=False),               # as os-instance-actions shows it
    Column("workflow", String(32), nullable=False),
    Column("version", Integer, nullable=False),               # of the workflow: an older conductor leaves it alone
    Column("args", Json, nullable=False),                     # frozen facts of the request
    Column("secrets", LongText),                              # encrypted; NULL from the moment the action ends
    Column("fence", BigInteger, nullable=False),
    # the journal's head: where it stands
    Column("state", String(16), nullable=False),              # due, waiting, done, failed, superseded, stuck
    Column("phase", String(8), nullable=False, server_default="do"),
    Column("step", String(32)),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("data", Json, nullable=False),                     # what steps left for later steps
    Column("host", String(255)),                              # of the command in hand
    _time("sent_at"),
    Column("sends", Integer, nullable=False, server_default="0"),
    Column("owner", String(64)),
    _time("lease_until"),
    _time("due_at"),                                          # when a conductor should look; NULL once ended
    Column("next_seq", Integer, nullable=False, server_default="1"),
    Column("message", Text),
    _time("created_at", nullable=False),
    _time("updated_at", nullable=False),
    _time("finished_at"),
    Index("ix_actions_due", "due_at"),
    Index("ix_actions_host", "host", "state"),
    Index("ix_actions_server", "server_id", "created_at"))

events = Table(
    "events", metadata,
    _uuid("action_id", primary_key=True),
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("step", String(32), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("event", String(16), nullable=False),              # started, succeeded, failed, undone, undo_failed
    Column("host", String(255)),
    Column("message", Text),                                  # safe for the tenant
    Column("details", Text),                                  # for the operator
    _time("at", nullable=False))

guests = Table(
    "guests", metadata,
    _uuid("server_id", primary_key=True),
    Column("host", String(255), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("wanted", String(8), nullable=False),              # running, stopped, absent (a debt)
    Column("may_run", Boolean, nullable=False),
    _time("changed_at", nullable=False),
    _time("sent_at"),                                         # of the last command to remove it
    Index("ix_guests_host", "host", "wanted"))

# --- hosts and services ---
services = Table(
    "services", metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    _uuid("uuid", nullable=False, unique=True),
    Column("host", String(255), nullable=False),
    Column("binary", String(64), nullable=False),             # nova-compute, nova-conductor, nova-scheduler
    Column("disabled", Boolean, nullable=False, server_default="0"),
    Column("disabled_reason", String(255)),
    Column("forced_down", Boolean, nullable=False, server_default="0"),
    _time("created_at", nullable=False),
    _time("updated_at", nullable=False),
    UniqueConstraint("host", "binary"))

heartbeats = Table(                                           # narrow: rewritten all the time
    "heartbeats", metadata,
    Column("host", String(255), primary_key=True),
    Column("binary", String(64), primary_key=True),
    _time("seen_at", nullable=False),
    Column("up", Boolean, nullable=False))                    # as the conductors judged, never by age alone

hosts = Table(
    "hosts", metadata,
    Column("name", String(255), primary_key=True),
    Column("session", BigInteger, nullable=False),
    Column("boot_id", String(64), nullable=False, server_default=""),
    Column("hypervisor_type", String(64), nullable=False),
    Column("hypervisor_version", BigInteger, nullable=False),
    Column("hypervisor_hostname", String(255), nullable=False),
    Column("host_ip", String(64), nullable=False),
    Column("cpu_info", Json, nullable=False),
    Column("traits", Json, nullable=False),
    _time("booted_at"),
    _time("created_at", nullable=False),
    _time("updated_at", nullable=False))

# --- placement ---
providers = Table(
    "providers", metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    _uuid("uuid", nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("host", String(255), nullable=False, unique=True),
    _uuid("parent_uuid"),
    _uuid("root_uuid", nullable=False),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    _time("created_at", nullable=False),
    _time("changed_at", nullable=False),
    Index("ix_providers_changed", "changed_at"))

inventories = Table(
    "inventories", metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    Column("resource_class", String(255), primary_key=True),
    Column("total", Integer, nullable=False),
    Column("reserved", Integer, nullable=False, server_default="0"),
    Column("min_unit", Integer, nullable=False, server_default="1"),
    Column("max_unit", Integer, nullable=False, server_default="2147483647"),
    Column("step_size", Integer, nullable=False, server_default="1"),
    Column("allocation_ratio", Float, nullable=False, server_default="1"))

provider_traits = Table(
    "provider_traits", metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    Column("trait", String(255), primary_key=True))

consumers = Table(
    "consumers", metadata,
    _uuid("id", primary_key=True),                            # a server, or a migration
    Column("type", String(16), nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("generation", BigInteger, nullable=False, server_default="0"),
    _time("created_at", nullable=False))

allocations = Table(
    "allocations", metadata,
    Column("provider_id", BigInteger, primary_key=True, autoincrement=False),
    Column("consumer_id", String(36), primary_key=True),
    Column("resource_class", String(255), primary_key=True),
    Column("used", Integer, nullable=False),
    Index("ix_allocations_usage", "provider_id", "resource_class", "used"),
    Index("ix_allocations_consumer", "consumer_id"))

# --- consoles (0003) ---
console_tokens = Table(
    "console_tokens", metadata,
    Column("hash", String(64), primary_key=True),             # SHA-256 of the token, which is nowhere
    _uuid("server_id", nullable=False),
    Column("host", String(255), nullable=False),
    Column("fence", BigInteger, nullable=False),              # of the guest's record: another place, another token
    Column("kind", String(16), nullable=False),               # novnc, serial, spice-html5 …
    Column("project_id", String(64), nullable=False),
    Column("user_id", String(64), nullable=False),
    _time("created_at", nullable=False),
    _time("expires_at", nullable=False, index=True),
    _time("used_at"),
    Index("ix_console_tokens_server", "server_id"))

# --- groups of hosts, groups of servers ---
aggregates = Table(
    "aggregates", metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    _uuid("uuid", nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("meta", Json, nullable=False),                     # availability_zone is a key of it
    _time("created_at", nullable=False),
    _time("updated_at"))

aggregate_hosts = Table(
    "aggregate_hosts", metadata,
    Column("aggregate_id", BigInteger, primary_key=True, autoincrement=False),
    Column("host", String(255), primary_key=True),
    Index("ix_aggregate_hosts_host", "host"))

server_groups = Table(
    "server_groups", metadata,
    _uuid("id", primary_key=True),
    Column("project_id", String(64), nullable=False, index=True),
    Column("user_id", String(64), nullable=False),
    Column("name", String(255), nullable=False),
    Column("policy", String(32), nullable=False),
    Column("rules", Json, nullable=False),
    _time("created_at", nullable=False))

server_group_members = Table(
    "server_group_members", metadata,
    _uuid("group_id", primary_key=True),
    _uuid("server_id", primary_key=True),
    Index("ix_server_group_members_server", "server_id"))
