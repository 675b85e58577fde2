# SPDX-License-Identifier: Apache-2.0
"""Passwords, files and user data: shown once, and stored encrypted in the action's row only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from common.clients.image import Image
from common.domain import errors
from common.domain.models import ImageRef
from common.security.vault import Vault
from common.store import schema
from compute_api.compute.request import passwords
from deploy.operator.store.sealed_columns import reseal, seal_user_data
from tests.api.conftest import IMAGE, Cloud
from tests.api.test_rebuild import OTHER_IMAGE

SECRET = "correct horse battery staple"


@pytest.fixture
def encrypting_cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """Return a cloud with a secret key, which encrypts and stores passwords."""
    return make_cloud(secret_key="a long random text")


def dump_database(cloud: Cloud) -> str:
    """Return the text of all rows in the database."""
    with cloud.store.engine.connect() as connection:
        return "".join(
            repr(tuple(row))
            for table in schema.metadata.sorted_tables
            for row in connection.execute(sa.select(table))
        )


def decrypt_newest_secrets(cloud: Cloud) -> Any:
    """Return the decrypted secrets of the newest action."""
    assert cloud.vault is not None
    newest = max(cloud.rows(schema.actions), key=lambda row: (row.created_at, row.fence))
    return None if newest.secrets is None else cloud.vault.open(newest.secrets)


def create_server(cloud: Cloud, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", **more}}
    answer = cloud.call("POST", "/servers", body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json["server"]


@pytest.mark.parametrize("fields", [{}, {"adminPass": SECRET}])
def test_create_server_returns_password_and_stores_it_encrypted(
    encrypting_cloud: Cloud, fields: dict[str, str]
) -> None:
    password = create_server(encrypting_cloud, **fields)["adminPass"]
    assert password == fields.get("adminPass", password)
    assert len(password) >= 12
    assert decrypt_newest_secrets(encrypting_cloud) == {"admin_pass": password}
    assert password not in dump_database(encrypting_cloud)


def test_create_several_servers_gives_all_the_same_password(encrypting_cloud: Cloud) -> None:
    password = create_server(encrypting_cloud, min_count=3)["adminPass"]
    assert encrypting_cloud.vault is not None
    assert [
        encrypting_cloud.vault.open(row.secrets) for row in encrypting_cloud.rows(schema.actions)
    ] == [{"admin_pass": password}] * 3


def test_repeated_idempotent_create_returns_the_same_password(encrypting_cloud: Cloud) -> None:
    first, second = (create_server(encrypting_cloud, {"Idempotency-Key": "k"}) for _ in range(2))
    assert (first["id"], first["adminPass"]) == (second["id"], second["adminPass"])
    assert decrypt_newest_secrets(encrypting_cloud) == {"admin_pass": first["adminPass"]}


def test_create_server_without_configured_secret_key_stores_no_password(cloud: Cloud) -> None:
    create_server(cloud, adminPass=SECRET)
    assert [row.secrets for row in cloud.rows(schema.actions)] == [None]
    assert SECRET not in dump_database(cloud)


@pytest.mark.parametrize("password_field", [{}, {"adminPass": SECRET}])
@pytest.mark.parametrize(
    ("key", "fields", "status"), [("rescue", {}, 200), ("rebuild", {"imageRef": IMAGE}, 202)]
)
def test_rescue_and_rebuild_return_password_and_store_it_encrypted(
    encrypting_cloud: Cloud,
    key: str,
    fields: dict[str, str],
    status: int,
    password_field: dict[str, str],
) -> None:
    server = encrypting_cloud.create()
    encrypting_cloud.set_state(server)
    answer = encrypting_cloud.call(
        "POST", f"/servers/{server}/action", {key: {**fields, **password_field}}
    )
    assert answer.status_code == status, answer.text
    password = answer.json.get("server", answer.json)["adminPass"]
    assert password == password_field.get("adminPass", password)
    assert decrypt_newest_secrets(encrypting_cloud) == {"admin_pass": password}
    assert password not in dump_database(encrypting_cloud)
    assert (
        password
        not in encrypting_cloud.call("GET", f"/servers/{server}", token="admin", mv="2.104").text
    )


def test_change_password_stores_password_encrypted(encrypting_cloud: Cloud) -> None:
    server = encrypting_cloud.create()
    encrypting_cloud.set_state(server)
    answer = encrypting_cloud.call(
        "POST", f"/servers/{server}/action", {"changePassword": {"adminPass": SECRET}}
    )
    assert (answer.status_code, answer.content) == (202, b"")
    assert decrypt_newest_secrets(encrypting_cloud) == {"admin_pass": SECRET}
    assert SECRET not in dump_database(encrypting_cloud)


def test_change_password_without_configured_secret_key_returns_501(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.set_state(server)
    answer = cloud.call(
        "POST", f"/servers/{server}/action", {"changePassword": {"adminPass": SECRET}}
    )
    assert answer.status_code == 501
    assert "secret_key" in answer.json["notImplemented"]["message"]
    assert len(cloud.rows(schema.actions)) == 1


FILES = [{"path": "/etc/key", "contents": "c2VhbGVkIGZpbGU="}]


def test_files_and_user_data_of_create_and_rebuild_are_stored_encrypted(
    encrypting_cloud: Cloud,
) -> None:
    """The same holds for the user data that a rebuild has replaced."""
    answer = encrypting_cloud.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "vm",
                "imageRef": IMAGE,
                "flavorRef": "1",
                "personality": FILES,
                "user_data": "Zm9ybWVy",
            }
        },
    )
    assert answer.status_code == 202, answer.text
    assert decrypt_newest_secrets(encrypting_cloud)["files"] == FILES
    assert FILES[0]["contents"] not in dump_database(
        encrypting_cloud
    ) and "Zm9ybWVy" not in dump_database(encrypting_cloud)
    server = answer.json["server"]["id"]
    encrypting_cloud.set_state(server)
    encrypting_cloud.images.images[OTHER_IMAGE] = Image(ImageRef(OTHER_IMAGE, "raw", 10))
    body = {"rebuild": {"imageRef": OTHER_IMAGE, "user_data": None}}
    answer = encrypting_cloud.call("POST", f"/servers/{server}/action", body, mv="2.57")
    assert answer.status_code == 202, answer.text
    assert encrypting_cloud.vault is not None
    assert (
        encrypting_cloud.vault.open_text(
            decrypt_newest_secrets(encrypting_cloud)["before"]["user_data"]
        )
        == "Zm9ybWVy"
    )
    assert "Zm9ybWVy" not in dump_database(encrypting_cloud)


def test_create_server_with_files_returns_501_if_no_secret_key_is_set(cloud: Cloud) -> None:
    answer = cloud.call(
        "POST",
        "/servers",
        {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", "personality": FILES}},
    )
    assert (answer.status_code, cloud.rows(schema.servers)) == (501, [])
    assert "secret_key" in answer.json["notImplemented"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"changePassword": {"adminPass": SECRET, "more": 1}},
        {"rescue": {"adminPass": SECRET, "more": 1}},
        {"rebuild": {"adminPass": SECRET, "imageRef": "x"}},
        {"rebuild": {"adminPass": SECRET}},
        {"changePassword": {"adminPass": [SECRET]}},
        {"rescue": {"adminPass": {"a": SECRET}}},
    ],
)
def test_refused_request_does_not_repeat_password(cloud: Cloud, body: dict[str, Any]) -> None:
    server = cloud.create()
    cloud.set_state(server)
    answer = cloud.call("POST", f"/servers/{server}/action", body)
    assert answer.status_code == 400
    assert SECRET not in answer.text
    answer = cloud.call(
        "POST", "/servers", {"server": {"name": "vm", "adminPass": SECRET, "colour": "red"}}
    )
    assert answer.status_code == 400
    assert SECRET not in answer.text


def test_encrypted_user_data_is_shown_in_plain_text(encrypting_cloud: Cloud) -> None:
    body = {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", "user_data": "Zm9ybWVy"}
    server = encrypting_cloud.call("POST", "/servers", {"server": body}).json["server"]["id"]
    old = encrypting_cloud.create(name="old", user_data="b2xk")
    # A cloud without a secret_key stores plain text.
    encrypting_cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == old).values(user_data="b2xk")
        )
    )
    key = "OS-EXT-SRV-ATTR:user_data"
    for server_id, user_data in ((server, "Zm9ybWVy"), (old, "b2xk")):
        assert (
            encrypting_cloud.call("GET", f"/servers/{server_id}", mv="2.3", token="admin").json[
                "server"
            ][key]
            == user_data
        )
    items = encrypting_cloud.call(
        "GET", "/servers/detail?all_tenants=1", mv="2.3", token="admin"
    ).json["servers"]
    assert {item["id"]: item[key] for item in items} == {server: "Zm9ybWVy", old: "b2xk"}
    encrypting_cloud.set_state(server)
    rebuilt = encrypting_cloud.call(
        "POST",
        f"/servers/{server}/action",
        {"rebuild": {"imageRef": IMAGE, "user_data": "bmV3"}},
        mv="2.57",
    )
    assert rebuilt.status_code == 202 and rebuilt.json["server"]["user_data"] == "bmV3"
    assert "bmV3" not in dump_database(encrypting_cloud)
    assert (
        encrypting_cloud.call("GET", f"/servers/{server}", mv="2.3", token="admin").json["server"][
            key
        ]
        == "bmV3"
    )


def test_seal_user_data_encrypts_plain_rows_only(encrypting_cloud: Cloud) -> None:
    assert encrypting_cloud.vault is not None
    old, new, empty = (
        encrypting_cloud.create(user_data=user_data) for user_data in ("b2xk", "bmV3", "")
    )
    encrypting_cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == old).values(user_data="b2xk")
        )
    )
    before = {row.id: row.user_data for row in encrypting_cloud.rows(schema.servers)}
    assert seal_user_data(encrypting_cloud.store, encrypting_cloud.vault) == 1
    after = {row.id: row.user_data for row in encrypting_cloud.rows(schema.servers)}
    assert encrypting_cloud.vault.open_text(after[old]) == "b2xk" and "b2xk" not in dump_database(
        encrypting_cloud
    )
    assert (after[new], after[empty]) == (before[new], None)
    assert seal_user_data(encrypting_cloud.store, encrypting_cloud.vault) == 0


def test_reseal_encrypts_all_secrets_with_first_key(encrypting_cloud: Cloud) -> None:
    """Afterwards the first key alone opens them, and a second run changes nothing."""
    assert encrypting_cloud.vault is not None
    old, new = encrypting_cloud.vault, Vault("new")
    both = Vault(f"new,{old._keys[0]}")
    servers = [encrypting_cloud.create(user_data=data) for data in ("b2xk", "bmV3", "")]
    encrypting_cloud.store.write(
        lambda tx: tx.execute(
            sa.update(schema.actions).values(secrets=old.seal({"admin_pass": "s"}))
        )
    )
    changed = reseal(encrypting_cloud.store, both)
    assert changed == {
        "user data of servers": 2,
        "secrets of actions": len(servers),
        "connections of volumes": 0,
    }
    rows = {row.id: row.user_data for row in encrypting_cloud.rows(schema.servers)}
    assert [rows[server] and new.open_text(rows[server]) for server in servers] == [
        "b2xk",
        "bmV3",
        None,
    ]
    for row in encrypting_cloud.rows(schema.actions):
        assert new.open(row.secrets) == {"admin_pass": "s"}
    assert set(reseal(encrypting_cloud.store, both).values()) == {0}
    with pytest.raises(errors.Unavailable, match="another"):
        reseal(encrypting_cloud.store, Vault("third"))


def _guesses(cloud: Cloud, key: str, server: str, project: str) -> set[str]:
    """Return the passwords that a reader of the database can compute without the secret key."""
    texts = [f"{project}{key}{server}", f"{key}{server}", server, f"{project}\n{key}\n{server}"]
    digests = [row.digest for row in cloud.rows(schema.idempotency_keys)]
    secrets = [key, project, server, *digests, ""]
    return {
        "".join(passwords.LETTERS[byte % len(passwords.LETTERS)] for byte in code.digest()[:12])
        for secret in secrets
        for text in texts
        for code in [hmac.new(secret.encode(), text.encode(), hashlib.sha256)]
    }


@pytest.mark.parametrize("has_vault", [True, False])
def test_password_of_idempotent_create_is_not_computable_from_database(
    make_cloud: Callable[..., Cloud], has_vault: bool
) -> None:
    cloud = make_cloud(secret_key="a long random text" if has_vault else "")
    server = create_server(cloud, {"Idempotency-Key": "deploy-web-1"})
    project = cloud.rows(schema.servers)[0].project_id
    assert server["adminPass"] not in _guesses(cloud, "deploy-web-1", server["id"], project)


def test_password_of_idempotent_create_depends_on_secret_key(
    make_cloud: Callable[..., Cloud],
) -> None:
    clouds = [make_cloud(secret_key=text) for text in ("one", "two")]
    servers = [create_server(cloud, {"Idempotency-Key": "k"}) for cloud in clouds]
    row = clouds[1].rows(schema.servers)[0]
    clouds[0].change(
        schema.idempotency_keys, schema.idempotency_keys.c.key == "k", server_id=row.id
    )
    repeated = create_server(clouds[0], {"Idempotency-Key": "k"})
    assert repeated["id"] == servers[1]["id"]
    assert repeated["adminPass"] != servers[1]["adminPass"]


@pytest.mark.parametrize("has_vault", [True, False])
def test_digest_of_idempotent_body_is_not_a_plain_hash(
    make_cloud: Callable[..., Cloud], has_vault: bool
) -> None:
    cloud = make_cloud(secret_key="a long random text" if has_vault else "")
    create_server(cloud, {"Idempotency-Key": "k"}, adminPass=SECRET)
    body = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", "adminPass": SECRET}}
    [row] = cloud.rows(schema.idempotency_keys)
    plain_hash = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
    assert row.digest != plain_hash


def test_repeated_create_returns_no_generated_password_without_secret_key(cloud: Cloud) -> None:
    first, second = (create_server(cloud, {"Idempotency-Key": "k"}) for _ in range(2))
    assert first.pop("adminPass")
    assert second == first
    answers = [create_server(cloud, {"Idempotency-Key": "l"}, adminPass=SECRET) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[1]["adminPass"] == SECRET


def test_repeated_create_after_secret_key_rotation_returns_same_answer(
    encrypting_cloud: Cloud,
) -> None:
    first = create_server(encrypting_cloud, {"Idempotency-Key": "k"})
    encrypting_cloud.services.vault = Vault("another text, a long random text")
    assert create_server(encrypting_cloud, {"Idempotency-Key": "k"}) == first
    encrypting_cloud.services.vault = Vault("another text")
    body = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"}}
    answer = encrypting_cloud.call("POST", "/servers", body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 409
