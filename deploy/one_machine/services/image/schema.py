# SPDX-License-Identifier: Apache-2.0
"""The tables of the image service.

The column `upload` is the name of the image's file. In the status saving, only the upload with this
name may finish.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()

images = Table(
    "images",
    METADATA,
    Column("id", String, primary_key=True),
    Column("name", String),
    Column("status", String, nullable=False, default="queued"),
    Column("visibility", String, nullable=False, default="shared"),
    Column("owner", String),
    Column("container_format", String),
    Column("disk_format", String),
    Column("min_disk", Integer, nullable=False, default=0),
    Column("min_ram", Integer, nullable=False, default=0),
    Column("protected", Boolean, nullable=False, default=False),
    Column("os_hidden", Boolean, nullable=False, default=False),
    Column("size", BigInteger),
    Column("virtual_size", BigInteger),
    Column("checksum", String),
    Column("os_hash_algo", String),
    Column("os_hash_value", Text),
    Column("created_at", String, nullable=False),
    Column("updated_at", String, nullable=False),
    Column("tags", JSON, nullable=False, default=list),
    Column("properties", JSON, nullable=False, default=dict),
    Column("upload", String),
    Index("images_by_age", "created_at", "id"),
)
