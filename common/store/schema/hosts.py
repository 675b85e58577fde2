# SPDX-License-Identifier: Apache-2.0
"""Tables of hosts, services and aggregates."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Index, String, Table, Text, UniqueConstraint

from common.store.schema.columns import (
    NUMBERED,
    BigKey,
    Json,
    JsonObjectColumn,
    metadata,
    time_column,
    uuid_column,
)

services = Table(
    "services",
    metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    uuid_column("uuid", nullable=False, unique=True),
    Column("host", String(255), nullable=False),
    Column("binary", String(64), nullable=False),  # nova-compute, nova-conductor, nova-scheduler
    Column("disabled", Boolean, nullable=False, server_default="0"),
    Column("disabled_reason", String(255)),
    Column("forced_down", Boolean, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    # Time of a successful fencing. The host is forced down since.
    time_column("fenced_at"),
    Column("version", String(64)),  # of the service's code. NULL: not recorded yet
    UniqueConstraint("host", "binary"),
    **NUMBERED,
)

heartbeats = Table(  # narrow: rewritten all the time
    "heartbeats",
    metadata,
    Column("host", String(255), primary_key=True),
    Column("binary", String(64), primary_key=True),
    time_column("seen_at", nullable=False),
    # Judged by the conductors, never by age alone.
    Column("up", Boolean, nullable=False),
)

hosts = Table(
    "hosts",
    metadata,
    Column("name", String(255), primary_key=True),
    Column("session", BigInteger, nullable=False),
    Column("boot_id", String(64), nullable=False, server_default=""),
    Column("hypervisor_type", String(64), nullable=False),
    Column("hypervisor_version", BigInteger, nullable=False),
    Column("hypervisor_hostname", String(255), nullable=False),
    Column("host_ip", String(64), nullable=False),
    Column("cpu_info", Json, nullable=False),
    Column("traits", Json, nullable=False),
    time_column("booted_at"),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    Column("numa_nodes", Json),  # list of models.NumaNode
    Column("devices", Json),  # list of models.Device
    # Facts for filters.
    Column("facts", Json),
    Column("metrics", Json),  # name -> number, newest report
    time_column("metrics_at"),
    # The latest exchange in which the host reported its state.
    Column("newest_exchange", BigInteger, nullable=False, server_default="0"),
    # Servers with a reported guest but no guest record on this host, and as files/ID those with
    # files only. NULL: none.
    Column("unclaimed", Json),
    # Number of messages in the host's name that conductors refused, and the time of the last one.
    Column("refused_messages", BigInteger, nullable=False, server_default="0"),
    time_column("refused_at"),
    # The reported hypervisor name, if another host has it.
    Column("refused_hostname", String(255)),
    Index("ix_hosts_hypervisor_hostname", "hypervisor_hostname"),
)

host_images = Table(  # images that hosts shall fetch ahead
    "host_images",
    metadata,
    Column("host", String(255), primary_key=True),
    uuid_column("image_id", primary_key=True),
    Column("image", Json, nullable=False),  # models.ImageRef
    time_column("asked_at", nullable=False),
    time_column("sent_at"),
    Column("error", Text),
)

host_keys = Table(  # which keys of hosts count (common.security.host_keys)
    "host_keys",
    metadata,
    Column("host", String(255), primary_key=True),
    Column("generation", BigInteger, nullable=False),
    # End of the previous generation's validity.
    time_column("previous_until"),
    time_column("changed_at", nullable=False),
)

host_joins = Table(  # the token with which a host may join, the newest of each
    "host_joins",
    metadata,
    Column("host", String(255), primary_key=True),
    # Generation of the keys in the token.
    Column("generation", BigInteger, nullable=False),
    # Address of the host for the certificate, or "".
    Column("address", String(64), nullable=False),
    time_column("until", nullable=False),
    # Public key of the machine with the keys.
    Column("used_by", String(64)),
    time_column("used_at"),
)

host_actions = Table(  # drains and evacuations of hosts
    "host_actions",
    metadata,
    uuid_column("id", primary_key=True),
    Column("host", String(255), nullable=False),
    Column("open_host", String(255), unique=True),  # the host while the action is open, else NULL
    Column("name", String(16), nullable=False),  # host_actions.Name
    Column("state", String(16), nullable=False),  # host_actions.State
    Column("args", Json, nullable=False),  # host_actions.Arguments
    Column("progress", Json, nullable=False),  # host_actions.Progress
    # Outcome, and the next step.
    Column("message", Text, nullable=False),
    Column("user_id", String(64), nullable=False),
    Column("project_id", String(64), nullable=False),
    Column("request_id", String(64), nullable=False),
    # The conductor with the lease.
    Column("locked_by", String(255)),
    time_column("locked_until", nullable=False),
    # Number of the next event.
    Column("next_seq", BigInteger, nullable=False),
    time_column("created_at", nullable=False),
    time_column("updated_at", nullable=False),
    time_column("finished_at"),
    Index("ix_host_actions_host_created_at", "host", "created_at"),
)

host_action_events = Table(  # the journal of each
    "host_action_events",
    metadata,
    uuid_column("action_id", primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("event", String(16), nullable=False),  # host_actions.EventName
    # The server of the event, if any.
    uuid_column("server_id"),
    # The migration of the event, if any.
    uuid_column("migration"),
    Column("message", Text, nullable=False),
    time_column("at", nullable=False),
)

aggregates = Table(
    "aggregates",
    metadata,
    Column("id", BigKey, primary_key=True, autoincrement=True),
    uuid_column("uuid", nullable=False, unique=True),
    Column("name", String(255), nullable=False, unique=True),
    # The key availability_zone makes a zone.
    Column("meta", JsonObjectColumn, nullable=False),
    time_column("created_at", nullable=False),
    time_column("updated_at"),
    **NUMBERED,
)

aggregate_hosts = Table(
    "aggregate_hosts",
    metadata,
    Column("aggregate_id", BigInteger, primary_key=True, autoincrement=False),
    Column("host", String(255), primary_key=True),
    Index("ix_aggregate_hosts_host", "host"),
)
