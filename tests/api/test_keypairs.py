# SPDX-License-Identifier: Apache-2.0
"""Key pairs: generation, import, ownership and quota."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from common.store import schema
from tests.api.conftest import PROJECT, Cloud

SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGtQUDZWhs8k/cZcykMkaoX7ZE7DXld8TP79HyddMVTS me@here"


@pytest.mark.parametrize(
    ("mv", "status", "keys"),
    [
        ("2.1", 200, {"name", "public_key", "fingerprint", "user_id", "private_key"}),
        ("2.2", 201, {"name", "public_key", "fingerprint", "user_id", "private_key", "type"}),
        ("2.91", 201, {"name", "public_key", "fingerprint", "user_id", "private_key", "type"}),
    ],
)
def test_create_keypair_returns_private_key_and_does_not_store_it(
    cloud: Cloud, mv: str, status: int, keys: set[str]
) -> None:
    answer = cloud.call("POST", "/os-keypairs", {"keypair": {"name": "k"}}, mv=mv)
    assert answer.status_code == status
    pair = answer.json["keypair"]
    assert set(pair) == keys
    assert pair["private_key"].startswith("-----BEGIN RSA PRIVATE KEY-----")
    assert len(pair["fingerprint"].split(":")) == 16
    assert pair["private_key"] not in str(cloud.rows(schema.keypairs))
    shown_pair = cloud.call("GET", "/os-keypairs/k", mv=mv).json["keypair"]
    assert set(shown_pair) == keys - {"private_key"} | {
        "id",
        "created_at",
        "updated_at",
        "deleted",
        "deleted_at",
    }
    list_items = cloud.call("GET", "/os-keypairs", mv=mv).json["keypairs"]
    assert [set(item["keypair"]) for item in list_items] == [keys - {"private_key", "user_id"}]
    assert cloud.call("DELETE", "/os-keypairs/k", mv=mv).status_code == (
        202 if mv == "2.1" else 204
    )
    assert cloud.call("GET", "/os-keypairs/k", mv=mv).status_code == 404


def test_import_keypair_returns_fingerprint_and_409_for_taken_name(cloud: Cloud) -> None:
    body = {"keypair": {"name": "a@b.c", "public_key": SSH}}
    assert cloud.call("POST", "/os-keypairs", body, mv="2.91").status_code == 400
    pair = cloud.call("POST", "/os-keypairs", body, mv="2.92").json["keypair"]
    digest = hashlib.md5(base64.b64decode(SSH.split()[1]), usedforsecurity=False).hexdigest()
    assert pair == {
        "name": "a@b.c",
        "public_key": SSH,
        "type": "ssh",
        "user_id": "u1",
        "fingerprint": ":".join(digest[index : index + 2] for index in range(0, 32, 2)),
    }
    assert cloud.call("POST", "/os-keypairs", body, mv="2.92").json["conflictingRequest"][
        "message"
    ] == ("Key pair 'a@b.c' already exists.")
    assert (
        cloud.call("POST", "/os-keypairs", {"keypair": {"name": "n"}}, mv="2.92").status_code == 400
    )


@pytest.mark.parametrize(
    "key",
    [
        "",
        "nonsense",
        "ssh-rsa AAAA",
        "ssh-rsa !!!",
        SSH + "\n" + SSH,
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_import_keypair_with_invalid_public_key_returns_400(cloud: Cloud, key: str) -> None:
    for kind in ("ssh", "x509"):
        body = {"keypair": {"name": "k", "public_key": key, "type": kind}}
        assert cloud.call("POST", "/os-keypairs", body, mv="2.2").status_code == 400


def test_x509_keypair_is_generated_and_imported_with_same_fingerprint(cloud: Cloud) -> None:
    pair = cloud.call(
        "POST", "/os-keypairs", {"keypair": {"name": "k", "type": "x509"}}, mv="2.2"
    ).json["keypair"]
    assert pair["public_key"].startswith("-----BEGIN CERTIFICATE-----")
    imported = cloud.call(
        "POST",
        "/os-keypairs",
        {"keypair": {"name": "m", "type": "x509", "public_key": pair["public_key"]}},
        mv="2.2",
    ).json["keypair"]
    assert (imported["fingerprint"], len(imported["fingerprint"].split(":"))) == (
        pair["fingerprint"],
        20,
    )


def test_keypairs_of_another_user_are_accessible_to_admins_only(cloud: Cloud) -> None:
    body = {"keypair": {"name": "k", "public_key": SSH, "user_id": "u3"}}
    assert cloud.call("POST", "/os-keypairs", body, mv="2.10").status_code == 403
    assert cloud.call("POST", "/os-keypairs", body, mv="2.10", token="admin").status_code == 201
    assert cloud.call("GET", "/os-keypairs/k").status_code == 404
    assert cloud.call("GET", "/os-keypairs/k?user_id=u3", mv="2.10").status_code == 403
    assert (
        cloud.call("GET", "/os-keypairs/k?user_id=u3", mv="2.10", token="admin").status_code == 200
    )
    assert (
        cloud.call("GET", "/os-keypairs/k?user_id=u3", mv="2.9", token="admin").status_code == 404
    )
    assert (
        cloud.call("GET", "/os-keypairs", token="stranger").json["keypairs"][0]["keypair"]["name"]
        == "k"
    )


def test_keypairs_are_paged_and_limited_by_quota(make_cloud: Any) -> None:
    cloud: Cloud = make_cloud()
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"key_pairs": 3}}, token="admin")
    answers = [
        cloud.call(
            "POST", "/os-keypairs", {"keypair": {"name": name, "public_key": SSH}}
        ).status_code
        for name in ("c", "a", "b", "d")
    ]
    assert answers == [200, 200, 200, 403]
    page = cloud.call("GET", "/os-keypairs?limit=2", mv="2.35").json
    assert [item["keypair"]["name"] for item in page["keypairs"]] == ["a", "b"]
    assert page["keypairs_links"][0]["href"].endswith("/v2.1/os-keypairs?limit=2&marker=b")
    assert len(cloud.call("GET", "/os-keypairs?limit=2", mv="2.34").json["keypairs"]) == 3
    assert cloud.call("GET", "/os-keypairs?marker=z", mv="2.35").status_code == 400
