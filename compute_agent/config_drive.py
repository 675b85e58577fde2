# SPDX-License-Identifier: Apache-2.0
"""The config drive: a small disk that tells a guest who it is.

Called by the virt drivers when a server asks for one. ``files`` is pure: what the drive holds, path by path, in
the layout that cloud-init, Ignition and cloudbase-init read. ``build`` writes it as ISO 9660 with Joliet and Rock
Ridge, labelled ``config-2``. The metadata service will serve the same tree.
Must stay true: whatever a tenant put into a name or a key arrives as data, never as a path.
"""
from __future__ import annotations

import base64
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

import pycdlib

from common.models import GuestSpec

LABEL = "config-2"
#: Every version that guests ask for; ours answer alike, an older reader ignores keys it does not know.
VERSIONS = ("2012-08-10", "2013-04-04", "2013-10-17", "2015-10-15", "2016-06-30", "2016-10-06", "2017-02-22",
            "2018-08-27", "2020-10-14", "2025-04-04", "latest")
#: The first versions that have these files.
NETWORK_DATA_SINCE, VENDOR_DATA_SINCE, VENDOR_DATA2_SINCE = "2015-10-15", "2013-10-17", "2016-10-06"
SEED_BYTES = 512


def files(spec: GuestSpec, random_seed: bytes = b"") -> dict[str, bytes]:
    """What the drive holds: path -> content. ``random_seed`` feeds the guest's entropy pool."""
    user_data = base64.b64decode(spec.user_data) if spec.user_data else b""
    instance = {"meta_data.json": _json(meta_data(spec, random_seed)), "user_data": user_data}
    tree: dict[str, bytes] = {}
    for version in VERSIONS:
        held = dict(instance)
        if version >= VENDOR_DATA_SINCE:
            held["vendor_data.json"] = _json({})
        if version >= NETWORK_DATA_SINCE:
            held["network_data.json"] = _json({"links": [], "networks": [], "services": []})
        if version >= VENDOR_DATA2_SINCE:
            held["vendor_data2.json"] = _json({})
        tree |= {f"openstack/{version}/{name}": data for name, data in held.items() if data}
    for number, item in enumerate(spec.instance.get("files") or []):
        tree[f"openstack/{_content(number)}"] = base64.b64decode(item["contents"])
    tree["ec2/latest/meta-data.json"] = _json(ec2_meta_data(spec))
    if user_data:
        tree["ec2/latest/user-data"] = user_data
    return tree


def meta_data(spec: GuestSpec, random_seed: bytes = b"") -> dict[str, Any]:
    """The ``meta_data.json`` of a server."""
    instance = spec.instance
    keys: list[dict[str, str]] = instance.get("keys") or []
    data: dict[str, Any] = {
        "uuid": spec.server,
        "name": spec.name,
        "hostname": hostname(spec),
        "availability_zone": instance.get("availability_zone"),
        "project_id": instance.get("project_id"),
        "launch_index": instance.get("launch_index", 0),
        "devices": [],
        "dedicated_cpus": [],
        "random_seed": base64.b64encode(random_seed).decode(),
    }
    if instance.get("meta"):
        data["meta"] = instance["meta"]
    if keys:
        data["keys"] = [{"name": key["name"], "type": key.get("type", "ssh"), "data": key["data"]} for key in keys]
        ssh = {key["name"]: key["data"] for key in keys if key.get("type", "ssh") == "ssh"}
        data |= {"public_keys": ssh} if ssh else {}
    if instance.get("admin_pass"):
        data["admin_pass"] = instance["admin_pass"]
    if instance.get("files"):
        data["files"] = [{"path": item["path"], "content_path": f"/{_content(number)}"}
                         for number, item in enumerate(instance["files"])]
    return data


def _content(number: int) -> str:
    """Where a file that was given at creation lies on the drive; its own path stays data."""
    return f"content/{number:04d}"


def ec2_meta_data(spec: GuestSpec) -> dict[str, Any]:
    """The same in the words of EC2, for guests that read only those."""
    name = hostname(spec)
    zone = spec.instance.get("availability_zone")
    keys: list[dict[str, str]] = spec.instance.get("keys") or []
    public = {str(number): {"openssh-key": key["data"]} for number, key in enumerate(keys)
              if key.get("type", "ssh") == "ssh"}
    return {"instance-id": spec.server, "ami-launch-index": spec.instance.get("launch_index", 0),
            "instance-type": spec.flavor.name, "hostname": name, "local-hostname": name,
            "placement": {"availability-zone": zone}} | ({"public-keys": public} if public else {})


def hostname(spec: GuestSpec) -> str:
    """What the guest should call itself; the API has made it from the name, else the id does."""
    return str(spec.instance.get("hostname") or f"server-{spec.server}")


def build(spec: GuestSpec, path: Path) -> None:
    """Write the drive to ``path``, whole or not at all. OSError when the disk is full."""
    image = pycdlib.PyCdlib()
    image.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident=LABEL, sys_ident="LINUX",
              app_ident_str="KILONOVA")
    short: dict[str, str] = {}
    for name, data in files(spec, secrets.token_bytes(SEED_BYTES)).items():
        *folders, leaf = name.split("/")
        for depth in range(1, len(folders) + 1):
            folder = "/".join(folders[:depth])
            if folder not in short:
                short[folder] = f"{short.get('/'.join(folders[:depth - 1]), '')}/D{len(short):05d}"
                image.add_directory(short[folder], rr_name=folders[depth - 1], joliet_path=f"/{folder}")
        short[name] = f"{short['/'.join(folders)]}/F{len(short):05d}.;1"
        image.add_fp(io.BytesIO(data), len(data), short[name], rr_name=leaf, joliet_path=f"/{name}")
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        image.write_fp(file)
        file.flush()
        os.fsync(file.fileno())
    image.close()
    os.replace(part, path)


def _json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode()
