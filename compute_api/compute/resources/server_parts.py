# SPDX-License-Identifier: Apache-2.0
"""The parts of a create request, one small function each: pure, raising BadRequest that names the
field."""

from __future__ import annotations

import base64
import ipaddress
import re
import unicodedata
from collections.abc import Callable, Mapping

import orjson

from common import errors, hardware, image_checks, models
from common.clients.image import Image
from common.json_types import JsonMapping, JsonObject
from common.store.tenants.quotas import Numbers
from compute_api.edge.validation import is_true

MAX_HINTED_SERVERS = 64  # that hints name: each is looked up at every placement
MAX_HINT_BYTES = 16384  # bytes of hints, as JSON


def counts(body: JsonMapping) -> tuple[int, int]:
    """min_count and max_count, with the API's defaults for either."""
    least = int(body.get("min_count") or 1)
    most = int(body.get("max_count") or least)
    if least < 1 or most < 1:
        raise errors.BadRequest("min_count and max_count must be at least 1")
    if least > most:
        raise errors.BadRequest("min_count must be <= max_count")
    if most > 1000:
        raise errors.BadRequest(
            "max_count must be at most 1000: make the servers in several requests"
        )
    return least, most


def refuse_networks(body: JsonMapping) -> None:
    """Without a network service servers have no interfaces: nothing, "none" and "auto" all mean
    that."""
    networks = body.get("networks")
    if isinstance(networks, list) and networks:
        raise errors.BadRequest(
            "networks: this cloud has no network service; leave networks out, or ask for "
            '"none" or "auto".'
        )


def check_signature(body: JsonMapping, image: Image) -> None:
    """Certificates are kept and shown; an image whose signature they were given for is refused, not
    booted unseen."""
    if body.get("trusted_image_certificates") and any(
        name.startswith("img_signature") for name in image.ref.properties
    ):
        raise errors.BadRequest(
            "trusted_image_certificates: this cloud does not validate image signatures, and "
            f"image {image.ref.id} is signed; leave the certificates out to boot it unvalidated."
        )


def access_ip(text: str | None) -> str | None:
    """An address as it is shown: of the ways to write one of IPv6 the short one (RFC 5952)."""
    return None if text is None else str(ipaddress.ip_address(text))


DISK_CONFIG = "OS-DCF:diskConfig"


def disk_config(
    body: JsonMapping, image_id: str | None, properties: Mapping[str, str]
) -> str | None:
    """Return AUTO or MANUAL, as the request or else the image has it; None: neither has it.

    Raises:
        BadRequest: The image disables AUTO, which the request asks for.
    """
    of_image = properties.get("auto_disk_config", properties.get("hw_auto_disk_config"))
    if body.get(DISK_CONFIG) == "AUTO" and str(of_image).strip().lower() == "disabled":
        raise errors.BadRequest(f"Requested image {image_id} has automatic disk resize disabled.")
    if DISK_CONFIG in body:
        return str(body[DISK_CONFIG])
    return None if of_image is None else "AUTO" if is_true(of_image) else "MANUAL"


def security_groups(body: JsonMapping) -> list[dict[str, str]]:
    """The names asked for, each once; without any the default one."""
    names = dict.fromkeys(
        group["name"] for group in body.get("security_groups", ()) if "name" in group
    )
    return [{"name": name} for name in names or ("default",)]


def flavor_id(reference: str | int) -> str:
    """The id in a flavorRef, which may be a link."""
    return str(reference).rstrip("/").rpartition("/")[2]


def group_id(hints: JsonMapping) -> str | None:
    """The server group that the hints name."""
    group = hints.get("group")
    return group[0] if isinstance(group, list) and group else group or None


def personality(body: JsonMapping, ask: Callable[[], Numbers]) -> list[dict[str, str]]:
    """The files to put on the config drive, within the limits, which are asked for when there are
    files."""
    files = [
        {
            "path": str(item.get("path", "")),
            "contents": "".join(str(item.get("contents", "")).split()),
        }
        for item in body.get("personality", ())
    ]
    if not files:
        return []
    limits = ask()
    most, path, content = (
        limits.of("injected_" + name) for name in ("files", "file_path_bytes", "file_content_bytes")
    )
    if 0 <= most < len(files):
        raise errors.Forbidden(f"Quota exceeded: at most {most} injected files.")
    for item in files:
        if not item["path"]:
            raise errors.BadRequest("personality: each file needs a path.")
        if 0 <= path < len(item["path"].encode()):
            raise errors.Forbidden(f"Quota exceeded: a path has at most {path} bytes.")
        if 0 <= content < len(base64.b64decode(item["contents"])):
            raise errors.Forbidden(f"Quota exceeded: a file has at most {content} bytes.")
    return files


def check_metadata(metadata: Mapping[str, str], ask: Callable[[], Numbers]) -> None:
    """Within the limit of items, which is asked for when there are some. Raises Forbidden, as the
    API has it."""
    if metadata and 0 <= (limit := ask().of("metadata_items")) < len(metadata):
        raise errors.Forbidden(f"Maximum number of metadata items exceeds {limit}")


def check_hints(hints: JsonMapping) -> None:
    """Hints are stored and travel with every placement of the server: few, small, and none of our
    own making."""
    for name in hints:
        if name.startswith("_"):
            raise errors.BadRequest(
                f"os:scheduler_hints.{name[:80]}: names that begin with _ are not for requests."
            )
    servers: set[str] = set()
    for name in ("same_host", "different_host"):
        named = hints.get(name, ())
        servers.update([named] if isinstance(named, str) else named)
        if len(servers) > MAX_HINTED_SERVERS:
            raise errors.BadRequest(
                f"os:scheduler_hints.{name}: hints name at most {MAX_HINTED_SERVERS} servers."
            )
    if isinstance(hints.get("group"), list) and len(hints["group"]) > 1:
        raise errors.BadRequest("os:scheduler_hints.group: a server can be in one group only.")
    if len(orjson.dumps(hints)) > MAX_HINT_BYTES:
        raise errors.BadRequest(f"os:scheduler_hints: at most {MAX_HINT_BYTES} bytes.")


def check_same_place(flavor: models.Flavor, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """A rebuilt server keeps its place on its host, so another image must not ask for another
    one."""
    after = _place(flavor, new)
    try:
        before = _place(flavor, old)
    except errors.BadRequest:  # made by a version that passed over what it did not know
        before = _place(flavor, {})
    for words, wanted in after.items():
        if wanted != before[words]:
            raise errors.BadRequest(
                f"imageRef: this image asks for other {words} than the server has, and a rebuild "
                "keeps the server's place on its host; make a new server from it."
            )


def _place(flavor: models.Flavor, properties: Mapping[str, str]) -> JsonObject:
    """What a guest holds of its host, by what it is called."""
    wanted = hardware.hardware(flavor, properties)
    return {
        "resources": hardware.resources(flavor, properties),
        "NUMA nodes": wanted.numa_nodes,
        "CPUs of its own": (wanted.dedicated, wanted.threads),
        "memory pages": wanted.page_kb,
        "PCI devices": (wanted.devices, wanted.options.get("pci_policy")),
    }


def check_image(image: Image, flavor: models.Flavor) -> None:
    """Can this image run in this flavor, on a disk of a host?"""
    image_checks.check_disk(image)
    image_checks.check_flavor(image, flavor)


def hostname(name: str, server_id: str, suffix: str = "") -> str:
    """A host name made of a server's name: letters, digits and hyphens, at most 63.

    Args:
        suffix: what tells the server from others of its request, which is never cut off.
    """
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    plain = re.sub(r"[ _.]", "-", plain)
    plain = re.sub(r"[^a-z0-9-]+", "", plain)[: 63 - len(suffix)].strip("-")
    return plain + suffix if plain else f"server-{server_id}"


def idempotency_key(text: str | None) -> str | None:
    """The header's value; any printable ASCII text of at most 255."""
    if text is None:
        return None
    if not 0 < len(text) <= 255 or not text.isascii() or not text.isprintable():
        raise errors.BadRequest("Idempotency-Key: give 1 to 255 printable ASCII characters.")
    return text
