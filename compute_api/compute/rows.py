# SPDX-License-Identifier: Apache-2.0
"""A server's row as handlers and views read it: the columns of the table, JSON as its text
(``store.servers``)."""

from __future__ import annotations

from typing import Protocol


class ServerRecord(Protocol):
    """One server."""

    id: str
    project_id: str
    user_id: str
    name: str
    hostname: str
    description: str | None
    # who may change it, and its state
    fence: int
    action: str | None  #: that holds it
    vm_state: str
    task_state: str | None
    power_state: int
    progress: int
    fault: str | None  #: JSON: code, message, details, created
    locked: bool
    locked_by: str | None
    locked_reason: str | None
    # where it is
    host: str | None
    availability_zone: str | None
    pinned_availability_zone: str | None
    # what it is made of
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
    password: str | None  #: what the guest posted
    disks: str | None  #: JSON: asked for beside its root disk
    shares: int
    # times in microseconds
    created_at: int
    updated_at: int
    launched_at: int | None
    terminated_at: int | None
    # long columns, which a list leaves out
    user_data: str | None
    key_data: str | None
