# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries of servers: those of 2.1, followed by the changes of each microversion."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    ANY,
    BOOLEAN,
    COUNT,
    DESCRIPTION,
    DISK_CONFIG,
    HOST,
    IPV4,
    IPV6,
    METADATA,
    NAME,
    TAG,
    UUID,
    integer,
    query,
    record,
    repeated,
    wrapped,
)
from compute_api.http.validation import Document, VersionedSchema, drop, put, require, strict

_ADDRESS: Document = {"anyOf": [IPV4, IPV6]}
_NETWORK = {"fixed_ip": _ADDRESS, "port": {"type": ["string", "null"], "format": "uuid"}}
_SIZE = integer(1)
_DEVICE = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[a-zA-Z0-9._/-]*$"}
_TEXT255: Document = {"type": "string", "maxLength": 255}
_MAPPING: Document = {
    "virtual_name": _TEXT255,
    "volume_id": UUID,
    "snapshot_id": UUID,
    "volume_size": _SIZE,
    "device_name": _DEVICE,
    "delete_on_termination": BOOLEAN,
    "no_device": ANY,
    "connection_info": {"type": "string", "maxLength": 16777215},
}
_MAPPING_V2: Document = {
    **_MAPPING,
    "source_type": {"enum": ["volume", "image", "snapshot", "blank"]},
    "image_id": UUID,
    "uuid": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[a-zA-Z0-9._-]*$"},
    "destination_type": {"enum": ["local", "volume"]},
    "guest_format": _TEXT255,
    "device_type": _TEXT255,
    "disk_bus": _TEXT255,
    "boot_index": {
        "anyOf": [
            {"type": "integer"},
            {"type": "string", "pattern": "^-?[0-9]+$", "format": "int32"},
            {"type": "null"},
        ]
    },
}
_MANY = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": "^0*[1-9][0-9]*$", "maxLength": 19},
    ]
}
#: A mapping in the image property block_device_mapping, which the owner of the image can write.
IMAGE_MAPPING = VersionedSchema(
    {
        "type": "object",
        "properties": {
            **_MAPPING_V2,
            "volume_size": {"anyOf": [integer(0), {"enum": [""]}]},
            "volume_type": _TEXT255,
            "tag": TAG,
        },
    }
)
_UUIDS: Document = {"anyOf": [UUID, {"type": "array", "items": UUID}]}
HINTS: Document = {
    "type": "object",
    "additionalProperties": True,
    "properties": {
        "group": _UUIDS,
        "different_host": _UUIDS,
        "same_host": {"anyOf": [{"type": "array", "items": UUID}, {"type": "string"}]},
        "query": {"type": ["string", "object"]},
        "target_cell": NAME,
        "different_cell": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
        },
        "build_near_host_ip": _ADDRESS,
        "cidr": {"type": "string", "pattern": "^/[0-9a-f.:]+$"},
    },
}
PERSONALITY: Document = {
    "type": "array",
    "items": record(
        {"path": {"type": "string"}, "contents": {"type": "string", "format": "base64"}}
    ),
}
USER_DATA: Document = {"type": "string", "format": "base64", "maxLength": 65535}
HOSTNAME: Document = {
    "type": "string",
    "maxLength": 63,
    "pattern": "^[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9]$",
}
FQDN: Document = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "pattern": "^[a-zA-Z0-9._-]*$",
}
CERTIFICATES: Document = {
    "anyOf": [
        {"type": "null"},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 50,
            "uniqueItems": True,
            "items": {"type": "string", "minLength": 1},
        },
    ]
}


def _networks(tag: bool) -> Document:
    """Return the schema of ``networks`` from 2.37 on: a list, "none" or "auto".

    ``tag`` is True if the items of the list may have tags.
    """
    known: Document = {**_NETWORK, "uuid": UUID, **({"tag": TAG} if tag else {})}
    return {"anyOf": [{"type": "array", "items": record(known)}, {"enum": ["none", "auto"]}]}


CREATE = VersionedSchema(
    record(
        {
            "server": record(
                {
                    "name": NAME,
                    "imageRef": {"anyOf": [UUID, {"type": "string", "maxLength": 0}]},
                    "flavorRef": {"type": ["string", "integer"], "minLength": 1, "maxLength": 255},
                    "adminPass": {"type": "string", "maxLength": 255},
                    "metadata": METADATA,
                    "networks": {
                        "type": "array",
                        "items": record({**_NETWORK, "uuid": {"type": "string"}}),
                    },
                    "OS-DCF:diskConfig": DISK_CONFIG,
                    "accessIPv4": IPV4,
                    "accessIPv6": IPV6,
                    "personality": PERSONALITY,
                    "availability_zone": NAME,
                    "block_device_mapping": {"type": "array", "items": record(_MAPPING)},
                    "block_device_mapping_v2": {"type": "array", "items": record(_MAPPING_V2)},
                    "config_drive": BOOLEAN,
                    "key_name": NAME,
                    "min_count": _MANY,
                    "max_count": _MANY,
                    "return_reservation_id": BOOLEAN,
                    "security_groups": {"type": "array", "items": record({"name": NAME})},
                    "user_data": USER_DATA,
                },
                ("name", "flavorRef"),
            ),
            "os:scheduler_hints": HINTS,
            "OS-SCH-HNT:scheduler_hints": HINTS,
        },
        ("server",),
    ),
    ("2.19", put("server/description", DESCRIPTION)),
    ("2.32", put("server/networks/*/tag", TAG), put("server/block_device_mapping_v2/*/tag", TAG)),
    ("2.33", drop("server/block_device_mapping_v2/*/tag")),
    ("2.37", put("server/networks", _networks(tag=False)), require("server/networks")),
    (
        "2.42",
        put("server/networks", _networks(tag=True)),
        put("server/block_device_mapping_v2/*/tag", TAG),
    ),
    ("2.52", put("server/tags", {"type": "array", "maxItems": 50, "items": TAG})),
    ("2.57", drop("server/personality")),
    ("2.63", put("server/trusted_image_certificates", CERTIFICATES)),
    (
        "2.67",
        put(
            "server/block_device_mapping_v2/*/volume_type",
            {"type": ["string", "null"], "maxLength": 255},
        ),
    ),
    ("2.74", put("server/host", HOST), put("server/hypervisor_hostname", HOST)),
    ("2.90", put("server/hostname", HOSTNAME)),
    ("2.94", put("server/hostname", FQDN)),
)

UPDATE = VersionedSchema(
    wrapped(
        "server",
        record(
            {"name": NAME, "OS-DCF:diskConfig": DISK_CONFIG, "accessIPv4": IPV4, "accessIPv6": IPV6}
        ),
    ),
    ("2.19", put("server/description", DESCRIPTION)),
    ("2.90", put("server/hostname", HOSTNAME)),
    ("2.94", put("server/hostname", FQDN)),
    (
        "2.104",
        put(
            "server/pinned_availability_zone",
            {"type": ["string", "null"], "minLength": 1, "maxLength": 255},
        ),
    ),
)

SORT_KEYS = (
    "access_ip_v4",
    "access_ip_v6",
    "auto_disk_config",
    "availability_zone",
    "config_drive",
    "created_at",
    "display_description",
    "display_name",
    "host",
    "hostname",
    "image_ref",
    "instance_type_id",
    "kernel_id",
    "key_name",
    "launch_index",
    "launched_at",
    "locked_by",
    "node",
    "power_state",
    "progress",
    "project_id",
    "ramdisk_id",
    "root_device_name",
    "task_state",
    "terminated_at",
    "updated_at",
    "user_id",
    "uuid",
    "vm_state",
)
#: Sort keys without effect, which are accepted before 2.75.
_OLD_SORT_KEYS = (
    "architecture",
    "cell_name",
    "cleaned",
    "default_ephemeral_device",
    "default_swap_device",
    "deleted",
    "deleted_at",
    "disable_terminate",
    "ephemeral_gb",
    "ephemeral_key_uuid",
    "id",
    "key_data",
    "launched_on",
    "locked",
    "memory_mb",
    "os_type",
    "reservation_id",
    "root_gb",
    "shutdown_terminate",
    "user_data",
    "vcpus",
    "vm_mode",
)
_PATTERN: Document = {"type": "string", "format": "regex", "maxLength": 255}
_TIME: Document = {"type": "string", "format": "date-time"}
_PLAIN = (
    "user_id",
    "project_id",
    "tenant_id",
    "launch_index",
    "image_ref",
    "image",
    "vm_state",
    "task_state",
    "host",
    "uuid",
    "sort_dir",
    "all_tenants",
    "soft_deleted",
    "deleted",
    "status",
    "marker",
    "block_device_mapping",
    "services",
    "metadata",
    "system_metadata",
    "info_cache",
    "security_groups",
    "pci_devices",
)
_PATTERNS = (
    "kernel_id",
    "ramdisk_id",
    "hostname",
    "key_name",
    "power_state",
    "node",
    "flavor",
    "reservation_id",
    "launched_at",
    "terminated_at",
    "availability_zone",
    "name",
    "display_name",
    "description",
    "display_description",
    "locked_by",
    "root_device_name",
    "config_drive",
    "access_ip_v4",
    "access_ip_v6",
    "auto_disk_config",
    "progress",
    "ip",
    "ip6",
    "created_at",
)


def _sort(*keys: str) -> Document:
    return repeated({"enum": list(keys)})


LIST = VersionedSchema(
    query(
        {
            **{name: repeated() for name in _PLAIN},
            **{name: repeated(_PATTERN) for name in _PATTERNS},
            "limit": repeated(COUNT),
            "changes-since": repeated(_TIME),
            "sort_key": _sort(*SORT_KEYS, *_OLD_SORT_KEYS),
        },
        patternProperties={"^_": repeated()},
    ),
    (
        "2.26",
        *(
            put(name, repeated(_PATTERN))
            for name in ("tags", "tags-any", "not-tags", "not-tags-any")
        ),
    ),
    ("2.66", put("changes-before", repeated(_TIME))),
    ("2.73", put("locked", repeated()), put("sort_key", _sort(*SORT_KEYS, *_OLD_SORT_KEYS))),
    ("2.75", put("sort_key", _sort(*SORT_KEYS, "locked")), strict),
)
