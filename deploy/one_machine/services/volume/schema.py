# SPDX-License-Identifier: Apache-2.0
"""The tables of the volume service."""

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
)

from deploy.one_machine.services.quotas import SetLimits

METADATA = MetaData()

types = Table(
    "types",
    METADATA,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("description", String),
    Column("is_public", Boolean, nullable=False, default=True),
    Column("extra_specs", JSON, nullable=False, default=dict),
    Column("created_at", String, nullable=False),
    Column("updated_at", String),
)

volumes = Table(
    "volumes",
    METADATA,
    Column("id", String, primary_key=True),
    Column("project_id", String, nullable=False),
    Column("user_id", String),
    Column("name", String),
    Column("description", String),
    Column("status", String, nullable=False),
    Column("previous_status", String),
    Column("size", Integer, nullable=False),
    Column("availability_zone", String, nullable=False),
    Column("type_id", ForeignKey("types.id"), nullable=False),
    Column("bootable", Boolean, nullable=False, default=False),
    Column("multiattach", Boolean, nullable=False, default=False),
    Column("readonly", Boolean),
    Column("snapshot_id", String),
    Column("source_volid", String),
    Column("metadata", JSON, nullable=False, default=dict),
    Column("image_metadata", JSON, nullable=False, default=dict),
    Column("created_at", String, nullable=False),
    Column("updated_at", String),
    Index("volumes_by_age", "created_at", "id"),
)

snapshots = Table(
    "snapshots",
    METADATA,
    Column("id", String, primary_key=True),
    Column("volume_id", ForeignKey("volumes.id"), nullable=False),
    Column("project_id", String, nullable=False),
    Column("user_id", String),
    Column("name", String),
    Column("description", String),
    Column("status", String, nullable=False),
    Column("progress", String, nullable=False, default="0%"),
    Column("size", Integer, nullable=False),
    Column("type_id", String, nullable=False),
    Column("metadata", JSON, nullable=False, default=dict),
    Column("image_metadata", JSON, nullable=False, default=dict),
    Column("created_at", String, nullable=False),
    Column("updated_at", String),
    Index("snapshots_of_volume", "volume_id"),
)

attachments = Table(
    "attachments",
    METADATA,
    Column("id", String, primary_key=True),
    Column("volume_id", ForeignKey("volumes.id"), nullable=False),
    Column("project_id", String, nullable=False),
    Column("instance", String),
    Column("status", String, nullable=False),
    Column("mode", String),
    Column("host", String),
    Column("mountpoint", String),
    Column("connector", JSON),
    Column("connection_info", JSON, nullable=False, default=dict),
    Column("attached_at", String),
    Column("created_at", String, nullable=False),
    Column("updated_at", String),
    Index("attachments_of_volume", "volume_id"),
)

quotas = SetLimits(METADATA)

#: Jobs in the order of their commits. The worker deletes a job whose target does not exist.
jobs = Table(
    "jobs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    # The id of the volume or snapshot that the job changes.
    Column("target_id", String, nullable=False),
    # The id of the volume or snapshot that the job reads.
    Column("source_id", String),
    Column("arguments", JSON, nullable=False, default=dict),
    Column("attempts", Integer, nullable=False, default=0),
    Column("not_before", Float, nullable=False, default=0.0),
    Index("jobs_by_target", "target_id"),
    Index("jobs_by_source", "source_id"),
)
