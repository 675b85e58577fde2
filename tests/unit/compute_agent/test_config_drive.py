# SPDX-License-Identifier: Apache-2.0
"""The config drive: its files, and that another program reads the disk as we meant it."""
from __future__ import annotations

import base64
import json
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from common.models import Flavor, GuestSpec
from compute_agent.config_drive import VERSIONS, build, files

SERVER = str(uuid.UUID(int=5))
KEYS = [{"name": "mine", "type": "ssh", "data": "ssh-ed25519 AAAA me"}, {"name": "x", "type": "x509", "data": "PEM"}]


def spec(**changed: object) -> GuestSpec:
    values: dict[str, object] = {
        "server": SERVER, "fence": 1, "name": "naïve <web> \"1\"", "flavor": Flavor("1", "m1.nano", 1, 128, 1),
        "config_drive": True, "user_data": base64.b64encode(b"#!/bin/sh\necho \xff hello\n").decode(),
        "instance": {"hostname": "web-1", "project_id": "p1", "availability_zone": "nova", "launch_index": 3,
                     "meta": {"../../etc": "a\nb"}, "keys": KEYS}}
    return GuestSpec(**{**values, **changed})  # type: ignore[arg-type]


def read_json(tree: dict[str, bytes], path: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(tree[path])
    return loaded


def test_meta_data_tells_the_guest_who_it_is() -> None:
    meta = read_json(files(spec(), b"seed"), "openstack/latest/meta_data.json")
    assert meta == {
        "uuid": SERVER, "name": "naïve <web> \"1\"", "hostname": "web-1", "project_id": "p1", "launch_index": 3,
        "availability_zone": "nova", "devices": [], "dedicated_cpus": [], "meta": {"../../etc": "a\nb"},
        "random_seed": base64.b64encode(b"seed").decode(), "keys": KEYS,
        "public_keys": {"mine": "ssh-ed25519 AAAA me"}}


def test_a_password_is_told_to_the_guest_that_it_is_for() -> None:
    told = files(spec(instance={"admin_pass": "s3cret"}))
    assert read_json(told, "openstack/latest/meta_data.json")["admin_pass"] == "s3cret"
    assert "admin_pass" not in read_json(files(spec()), "openstack/latest/meta_data.json")


def test_user_data_is_decoded_and_every_version_has_what_it_knew() -> None:
    tree = files(spec())
    assert {tree[f"openstack/{version}/user_data"] for version in VERSIONS} == {b"#!/bin/sh\necho \xff hello\n"}
    assert read_json(tree, "openstack/latest/network_data.json") == {"links": [], "networks": [], "services": []}
    assert "openstack/2012-08-10/vendor_data.json" not in tree
    assert "openstack/2013-10-17/vendor_data.json" in tree
    assert "openstack/2015-10-15/vendor_data2.json" not in tree
    assert read_json(tree, "ec2/latest/meta-data.json")["instance-id"] == SERVER


def test_files_given_at_creation_lie_beside_the_meta_data_that_names_them() -> None:
    given = spec()
    given.instance["files"] = [{"path": "/etc/motd", "contents": base64.b64encode(b"hello").decode()},
                               {"path": "../../x", "contents": ""}]
    tree = files(given)
    assert read_json(tree, "openstack/latest/meta_data.json")["files"] == [
        {"path": "/etc/motd", "content_path": "/content/0000"}, {"path": "../../x", "content_path": "/content/0001"}]
    assert (tree["openstack/content/0000"], tree["openstack/content/0001"]) == (b"hello", b"")


def test_bare_server_has_no_empty_files() -> None:
    tree = files(spec(user_data=None, instance={}))
    assert all(tree.values())
    assert not any(path.endswith(("user_data", "user-data")) for path in tree)
    meta = read_json(tree, "openstack/latest/meta_data.json")
    assert meta["hostname"] == f"server-{SERVER}"
    assert "keys" not in meta and "public_keys" not in meta and "meta" not in meta


def test_tenants_words_never_become_paths() -> None:
    for path in files(spec(name="../../../root", instance={"keys": [{"name": "../k", "data": "d"}]})):
        assert ".." not in path


@pytest.mark.skipif(shutil.which("isoinfo") is None, reason="isoinfo (package genisoimage) is not installed")
@pytest.mark.parametrize("names", ["-R", "-J"], ids=["rock-ridge", "joliet"])
def test_another_program_reads_the_same_files(tmp_path: Path, names: str) -> None:
    disk = tmp_path / "config"
    build(spec(), disk)
    assert not list(tmp_path.glob("*.part"))
    about = subprocess.run(["isoinfo", "-d", "-i", disk], capture_output=True, text=True, check=True).stdout
    assert "Volume id: config-2" in about and "Joliet" in about and "Rock Ridge" in about
    listed = subprocess.run(["isoinfo", names, "-f", "-i", disk], capture_output=True, text=True, check=True).stdout
    wanted = files(spec())
    assert {line[1:] for line in listed.splitlines()} >= set(wanted)
    for path, content in wanted.items():
        read = subprocess.run(["isoinfo", names, "-x", f"/{path}", "-i", disk], capture_output=True, check=True)
        if not path.endswith("/meta_data.json"):
            assert read.stdout == content, path
        else:
            assert len(base64.b64decode(json.loads(read.stdout)["random_seed"])) == 512
