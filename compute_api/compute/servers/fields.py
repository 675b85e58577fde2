# SPDX-License-Identifier: Apache-2.0
"""Parse and check the fields that requests for new and for existing servers share.

These functions are pure. Their errors name the field.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable, Mapping

import orjson

from common.domain import errors
from common.domain.json_types import JsonMapping
from common.store.tenants.quotas import Numbers
from compute_api.http.validation import is_true

#: Limit for servers in hints, because every placement looks up each of these servers.
MAX_HINTED_SERVERS = 64
#: Limit for the hints as JSON, in bytes.
MAX_HINT_BYTES = 16384


def parse_access_ip(text: str | None) -> str | None:
    """Return an address in the form that responses use, or None for None.

    IPv6 addresses get the form of RFC 5952.
    """
    return None if text is None else str(ipaddress.ip_address(text))


DISK_CONFIG = "OS-DCF:diskConfig"


def choose_disk_config(
    body: JsonMapping, image_id: str | None, properties: Mapping[str, str]
) -> str | None:
    """Return AUTO or MANUAL from the request or else the image, or None if neither has a value.

    Raises:
        BadRequest: The request has AUTO, and the image disables AUTO.
    """
    image_value = properties.get("auto_disk_config", properties.get("hw_auto_disk_config"))
    if body.get(DISK_CONFIG) == "AUTO" and str(image_value).strip().lower() == "disabled":
        raise errors.BadRequest(f"Requested image {image_id} has automatic disk resize disabled.")
    if DISK_CONFIG in body:
        return str(body[DISK_CONFIG])
    return None if image_value is None else "AUTO" if is_true(image_value) else "MANUAL"


def parse_flavor_id(reference: str | int) -> str:
    """Return the id in a flavorRef, which may be a link."""
    return str(reference).rstrip("/").rpartition("/")[2]


def parse_personality(
    body: JsonMapping, read_limits: Callable[[], Numbers]
) -> list[dict[str, str]]:
    """Return the files for the config drive, as objects with path and contents (base64).

    Limits are read by ``read_limits``, and only if there are files.

    Raises:
        Forbidden: There are too many files, or a path or a file is too long.
        BadRequest: A file has no path.
    """
    files = [
        {
            "path": str(item.get("path", "")),
            "contents": "".join(str(item.get("contents", "")).split()),
        }
        for item in body.get("personality", ())
    ]
    if not files:
        return []
    limits = read_limits()
    max_files, max_path, max_content = (
        limits.of("injected_" + name) for name in ("files", "file_path_bytes", "file_content_bytes")
    )
    if 0 <= max_files < len(files):
        raise errors.Forbidden(
            f"Quota exceeded: a request may have at most {max_files} injected files."
        )
    for item in files:
        if not item["path"]:
            raise errors.BadRequest("personality: each file needs a path.")
        if 0 <= max_path < len(item["path"].encode()):
            raise errors.Forbidden(
                f"Quota exceeded: the path of an injected file may have at most {max_path} bytes."
            )
        if 0 <= max_content < len(base64.b64decode(item["contents"])):
            raise errors.Forbidden(
                f"Quota exceeded: an injected file may have at most {max_content} bytes."
            )
    return files


def check_metadata(metadata: Mapping[str, str], read_limits: Callable[[], Numbers]) -> None:
    """Check the number of metadata items.

    The limit is read by ``read_limits``, and only if there are items.

    Raises:
        Forbidden: The metadata has too many items.
    """
    if metadata and 0 <= (limit := read_limits().of("metadata_items")) < len(metadata):
        raise errors.Forbidden(f"Maximum number of metadata items exceeds {limit}")


def check_hints(hints: JsonMapping) -> None:
    """Check scheduler hints.

    Why: hints are stored and sent with every placement of the server, so they are limited.

    Raises:
        BadRequest: Hints name too many servers or several groups, are too large, or have a reserved
            name.
    """
    for name in hints:
        if name.startswith("_"):
            raise errors.BadRequest(
                f"os:scheduler_hints.{name[:80]}: names that begin with _ are reserved; leave it out."
            )
    servers: set[str] = set()
    for name in ("same_host", "different_host"):
        hinted = hints.get(name, ())
        servers.update([hinted] if isinstance(hinted, str) else hinted)
        if len(servers) > MAX_HINTED_SERVERS:
            raise errors.BadRequest(
                f"os:scheduler_hints.{name}: same_host and different_host may together name at most "
                f"{MAX_HINTED_SERVERS} servers."
            )
    if isinstance(hints.get("group"), list) and len(hints["group"]) > 1:
        raise errors.BadRequest("os:scheduler_hints.group: a server can be in one group only.")
    if len(orjson.dumps(hints)) > MAX_HINT_BYTES:
        raise errors.BadRequest(
            f"os:scheduler_hints: the hints may have at most {MAX_HINT_BYTES} bytes as JSON."
        )
