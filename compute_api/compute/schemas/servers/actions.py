# SPDX-License-Identifier: Apache-2.0
"""Bodies of POST /servers/{id}/action, by key."""

from __future__ import annotations

from compute_api.compute.schemas.common import (
    ANY,
    BOOLEAN,
    DESCRIPTION,
    DISK_CONFIG,
    HOST,
    IPV4,
    IPV6,
    METADATA,
    NAME,
    UUID,
    integer,
    record,
    wrapped,
)
from compute_api.compute.schemas.servers import addresses, consoles
from compute_api.compute.schemas.servers.servers import (
    CERTIFICATES,
    FQDN,
    HOSTNAME,
    PERSONALITY,
    USER_DATA,
)
from compute_api.http.validation import Document, VersionedSchema, drop, put

_LENGTH: Document = {"anyOf": [integer(-1), {"type": "null"}]}
_NULL: Document = {"type": "null"}
_PASSWORD: Document = {"type": "string", "maxLength": 255}
_SOME_HOST: Document = {**HOST, "type": ["string", "null"]}
_BLOCK_MIGRATION: Document = {"enum": [*BOOLEAN["enum"], "auto"]}
_IMAGE: Document = {"name": NAME, "metadata": METADATA}


def _or_null(content: Document) -> Document:
    return {"anyOf": [_NULL, content]}


def _plain(key: str) -> VersionedSchema:
    """Return the schema of a body with only the key of an action. Any value is valid."""
    return VersionedSchema(wrapped(key, ANY))


#: Any body, because the handler chooses the schema by the key.
BODY = VersionedSchema({"type": "object"})

BY_KEY: dict[str, VersionedSchema] = {
    **{
        key: _plain(key)
        for key in (
            "os-start",
            "os-stop",
            "pause",
            "unpause",
            "suspend",
            "resume",
            "unrescue",
            "restore",
            "forceDelete",
            "shelve",
            "shelveOffload",
            "confirmResize",
            "revertResize",
        )
    },
    "reboot": VersionedSchema(
        wrapped(
            "reboot",
            record({"type": {"enum": ["HARD", "Hard", "hard", "SOFT", "Soft", "soft"]}}, ("type",)),
        )
    ),
    "os-getConsoleOutput": VersionedSchema(
        wrapped("os-getConsoleOutput", record({"length": _LENGTH}))
    ),
    **consoles.ACTIONS,
    **addresses.ACTIONS,
    "rescue": VersionedSchema(
        wrapped("rescue", _or_null(record({"adminPass": _PASSWORD, "rescue_image_ref": UUID})))
    ),
    "rebuild": VersionedSchema(
        wrapped(
            "rebuild",
            record(
                {
                    "name": NAME,
                    "imageRef": UUID,
                    "adminPass": _PASSWORD,
                    "metadata": METADATA,
                    "preserve_ephemeral": BOOLEAN,
                    "OS-DCF:diskConfig": DISK_CONFIG,
                    "accessIPv4": IPV4,
                    "accessIPv6": IPV6,
                    "personality": PERSONALITY,
                },
                ("imageRef",),
            ),
        ),
        ("2.19", put("rebuild/description", DESCRIPTION)),
        ("2.54", put("rebuild/key_name", _or_null(NAME))),
        ("2.57", put("rebuild/user_data", _or_null(USER_DATA)), drop("rebuild/personality")),
        ("2.63", put("rebuild/trusted_image_certificates", CERTIFICATES)),
        ("2.90", put("rebuild/hostname", HOSTNAME)),
        ("2.94", put("rebuild/hostname", FQDN)),
    ),
    "changePassword": VersionedSchema(
        wrapped("changePassword", record({"adminPass": _PASSWORD}, ("adminPass",)))
    ),
    "trigger_crash_dump": VersionedSchema(wrapped("trigger_crash_dump", _NULL)),
    "createImage": VersionedSchema(wrapped("createImage", record(_IMAGE, ("name",)))),
    "createBackup": VersionedSchema(
        wrapped(
            "createBackup",
            record(
                {
                    **_IMAGE,
                    "backup_type": {"type": "string", "maxLength": 255},
                    "rotation": integer(0),
                },
                ("name", "backup_type", "rotation"),
            ),
        )
    ),
    "lock": VersionedSchema(
        wrapped("lock", ANY),
        (
            "2.73",
            put(
                "lock",
                _or_null(
                    record({"locked_reason": {"type": "string", "minLength": 1, "maxLength": 255}})
                ),
            ),
        ),
    ),
    "unlock": VersionedSchema(
        wrapped("unlock", ANY), ("2.73", put("unlock", _or_null(record({}))))
    ),
    "injectNetworkInfo": VersionedSchema(wrapped("injectNetworkInfo", ANY)),
    "os-resetState": VersionedSchema(
        wrapped("os-resetState", record({"state": {"enum": ["active", "error"]}}, ("state",)))
    ),
    **{
        key: VersionedSchema(
            wrapped(key, record({"name": {"type": "string", "minLength": 1}}, ("name",)))
        )
        for key in ("addSecurityGroup", "removeSecurityGroup")
    },
    "unshelve": VersionedSchema(
        wrapped("unshelve", ANY),
        (
            "2.77",
            put("unshelve", _or_null(record({"availability_zone": NAME}, ("availability_zone",)))),
        ),
        (
            "2.91",
            put("unshelve", _or_null(record({"availability_zone": _or_null(NAME), "host": HOST}))),
        ),
    ),
    "resize": VersionedSchema(
        wrapped(
            "resize",
            record(
                {
                    "flavorRef": {"type": ["string", "integer"], "minLength": 1, "maxLength": 255},
                    "OS-DCF:diskConfig": DISK_CONFIG,
                },
                ("flavorRef",),
            ),
        )
    ),
    "migrate": VersionedSchema(
        wrapped("migrate", ANY),
        ("2.56", put("migrate", {**record({"host": _SOME_HOST}), "type": ["object", "null"]})),
    ),
    "os-migrateLive": VersionedSchema(
        wrapped(
            "os-migrateLive",
            record(
                {"host": _SOME_HOST, "block_migration": BOOLEAN, "disk_over_commit": BOOLEAN},
                ("host", "block_migration", "disk_over_commit"),
            ),
        ),
        (
            "2.25",
            put(
                "os-migrateLive",
                record(
                    {"host": _SOME_HOST, "block_migration": _BLOCK_MIGRATION},
                    ("host", "block_migration"),
                ),
            ),
        ),
        ("2.30", put("os-migrateLive/force", BOOLEAN)),
        ("2.68", drop("os-migrateLive/force")),
    ),
    "evacuate": VersionedSchema(
        wrapped(
            "evacuate",
            record(
                {"host": HOST, "onSharedStorage": BOOLEAN, "adminPass": _PASSWORD},
                ("onSharedStorage",),
            ),
        ),
        ("2.14", put("evacuate", record({"host": HOST, "adminPass": _PASSWORD}))),
        ("2.29", put("evacuate/force", BOOLEAN)),
        ("2.68", drop("evacuate/force")),
    ),
}
