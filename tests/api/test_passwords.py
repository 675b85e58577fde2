# SPDX-License-Identifier: Apache-2.0
"""Passwords: told once in the answer, sealed in the action's row, and nowhere else in what is kept
or said."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from common.clients.image import Image
from common.domain.models import ImageRef
from common.security.vault import Vault
from common.store import schema
from compute_api.compute.request import passwords
from deploy.operator.store.user_data import seal_user_data
from tests.api.conftest import IMAGE, Cloud
from tests.api.test_rebuild import OTHER_IMAGE

SECRET = "correct horse battery staple"


@pytest.fixture
def sealing(make_cloud: Callable[..., Cloud]) -> Cloud:
    """A cloud that keeps passwords."""
    return make_cloud(secret_key="a long random text")


def everything(cloud: Cloud) -> str:
    """All that the database holds."""
    with cloud.store.engine.connect() as connection:
        return "".join(
            repr(tuple(row))
            for table in schema.metadata.sorted_tables
            for row in connection.execute(sa.select(table))
        )


def last_secret(cloud: Cloud) -> Any:
    """What the newest action keeps, opened."""
    assert cloud.vault is not None
    newest = max(cloud.rows(schema.actions), key=lambda row: (row.created_at, row.fence))
    return None if newest.secrets is None else cloud.vault.open(newest.secrets)


def create(cloud: Cloud, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", **more}}
    answer = cloud.call("POST", "/servers", body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json["server"]


@pytest.mark.parametrize("given", [{}, {"adminPass": SECRET}])
def test_the_password_of_a_create_is_told_and_sealed(sealing: Cloud, given: dict[str, str]) -> None:
    told = create(sealing, **given)["adminPass"]
    assert told == given.get("adminPass", told)
    assert len(told) >= 12
    assert last_secret(sealing) == {"admin_pass": told}
    assert told not in everything(sealing)


def test_all_servers_of_one_create_have_the_same_password(sealing: Cloud) -> None:
    told = create(sealing, min_count=3)["adminPass"]
    assert sealing.vault is not None
    assert [sealing.vault.open(row.secrets) for row in sealing.rows(schema.actions)] == [
        {"admin_pass": told}
    ] * 3


def test_the_same_create_again_tells_the_same_password(sealing: Cloud) -> None:
    first, again = (create(sealing, {"Idempotency-Key": "k"}) for _ in range(2))
    assert (first["id"], first["adminPass"]) == (again["id"], again["adminPass"])
    assert last_secret(sealing) == {"admin_pass": first["adminPass"]}


def test_without_a_key_a_password_is_told_and_not_kept(cloud: Cloud) -> None:
    create(cloud, adminPass=SECRET)
    assert [row.secrets for row in cloud.rows(schema.actions)] == [None]
    assert SECRET not in everything(cloud)


@pytest.mark.parametrize("given", [{}, {"adminPass": SECRET}])
@pytest.mark.parametrize(
    ("key", "more", "status"), [("rescue", {}, 200), ("rebuild", {"imageRef": IMAGE}, 202)]
)
def test_rescue_and_rebuild_tell_and_seal_one(
    sealing: Cloud, key: str, more: dict[str, str], status: int, given: dict[str, str]
) -> None:
    server = sealing.create()
    sealing.rest(server)
    answer = sealing.call("POST", f"/servers/{server}/action", {key: {**more, **given}})
    assert answer.status_code == status, answer.text
    told = answer.json.get("server", answer.json)["adminPass"]
    assert told == given.get("adminPass", told)
    assert last_secret(sealing) == {"admin_pass": told}
    assert told not in everything(sealing)
    assert told not in sealing.call("GET", f"/servers/{server}", token="admin", mv="2.104").text


def test_a_password_to_set_is_sealed(sealing: Cloud) -> None:
    server = sealing.create()
    sealing.rest(server)
    answer = sealing.call(
        "POST", f"/servers/{server}/action", {"changePassword": {"adminPass": SECRET}}
    )
    assert (answer.status_code, answer.content) == (202, b"")
    assert last_secret(sealing) == {"admin_pass": SECRET}
    assert SECRET not in everything(sealing)


def test_a_cloud_without_a_key_sets_none(cloud: Cloud) -> None:
    server = cloud.create()
    cloud.rest(server)
    answer = cloud.call(
        "POST", f"/servers/{server}/action", {"changePassword": {"adminPass": SECRET}}
    )
    assert answer.status_code == 501
    assert "secret_key" in answer.json["notImplemented"]["message"]
    assert len(cloud.rows(schema.actions)) == 1


FILES = [{"path": "/etc/key", "contents": "c2VhbGVkIGZpbGU="}]


def test_files_and_user_data_are_sealed(sealing: Cloud) -> None:
    """Of the server, and what a rebuild has replaced."""
    answer = sealing.call(
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
    assert last_secret(sealing)["files"] == FILES
    assert FILES[0]["contents"] not in everything(sealing) and "Zm9ybWVy" not in everything(sealing)
    server = answer.json["server"]["id"]
    sealing.rest(server)
    sealing.images.images[OTHER_IMAGE] = Image(ImageRef(OTHER_IMAGE, "raw", 10))
    body = {"rebuild": {"imageRef": OTHER_IMAGE, "user_data": None}}
    answer = sealing.call("POST", f"/servers/{server}/action", body, mv="2.57")
    assert answer.status_code == 202, answer.text
    assert sealing.vault is not None
    assert sealing.vault.open_text(last_secret(sealing)["before"]["user_data"]) == "Zm9ybWVy"
    assert "Zm9ybWVy" not in everything(sealing)


def test_a_cloud_without_a_key_injects_no_files(cloud: Cloud) -> None:
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
def test_a_refusal_does_not_repeat_it(cloud: Cloud, body: dict[str, Any]) -> None:
    server = cloud.create()
    cloud.rest(server)
    answer = cloud.call("POST", f"/servers/{server}/action", body)
    assert answer.status_code == 400
    assert SECRET not in answer.text
    answer = cloud.call(
        "POST", "/servers", {"server": {"name": "vm", "adminPass": SECRET, "colour": "red"}}
    )
    assert answer.status_code == 400
    assert SECRET not in answer.text


def test_sealed_user_data_is_shown_as_it_was_given(sealing: Cloud) -> None:
    body = {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", "user_data": "Zm9ybWVy"}
    server = sealing.call("POST", "/servers", {"server": body}).json["server"]["id"]
    old = sealing.create(name="old", user_data="b2xk")
    # as a cloud without a secret_key keeps it
    sealing.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == old).values(user_data="b2xk")
        )
    )
    key = "OS-EXT-SRV-ATTR:user_data"
    for made, given in ((server, "Zm9ybWVy"), (old, "b2xk")):
        assert (
            sealing.call("GET", f"/servers/{made}", mv="2.3", token="admin").json["server"][key]
            == given
        )
    listed = sealing.call("GET", "/servers/detail?all_tenants=1", mv="2.3", token="admin").json[
        "servers"
    ]
    assert {one["id"]: one[key] for one in listed} == {server: "Zm9ybWVy", old: "b2xk"}
    sealing.rest(server)
    rebuilt = sealing.call(
        "POST",
        f"/servers/{server}/action",
        {"rebuild": {"imageRef": IMAGE, "user_data": "bmV3"}},
        mv="2.57",
    )
    assert rebuilt.status_code == 202 and rebuilt.json["server"]["user_data"] == "bmV3"
    assert "bmV3" not in everything(sealing)
    assert (
        sealing.call("GET", f"/servers/{server}", mv="2.3", token="admin").json["server"][key]
        == "bmV3"
    )


def test_an_upgrade_seals_what_could_be_read(sealing: Cloud) -> None:
    assert sealing.vault is not None
    old, new, none = (sealing.create(user_data=given) for given in ("b2xk", "bmV3", ""))
    sealing.store.write(
        lambda tx: tx.execute(
            sa.update(schema.servers).where(schema.servers.c.id == old).values(user_data="b2xk")
        )
    )
    before = {row.id: row.user_data for row in sealing.rows(schema.servers)}
    assert seal_user_data(sealing.store, sealing.vault) == 1
    after = {row.id: row.user_data for row in sealing.rows(schema.servers)}
    assert sealing.vault.open_text(after[old]) == "b2xk" and "b2xk" not in everything(sealing)
    assert (after[new], after[none]) == (before[new], None)
    assert seal_user_data(sealing.store, sealing.vault) == 0


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
def test_password_of_idempotent_create_does_not_follow_from_the_database(
    make_cloud: Callable[..., Cloud], has_vault: bool
) -> None:
    cloud = make_cloud(secret_key="a long random text" if has_vault else "")
    server = create(cloud, {"Idempotency-Key": "deploy-web-1"})
    project = cloud.rows(schema.servers)[0].project_id
    assert server["adminPass"] not in _guesses(cloud, "deploy-web-1", server["id"], project)


def test_password_of_idempotent_create_depends_on_the_secret_key(
    make_cloud: Callable[..., Cloud],
) -> None:
    clouds = [make_cloud(secret_key=text) for text in ("one", "two")]
    servers = [create(cloud, {"Idempotency-Key": "k"}) for cloud in clouds]
    row = clouds[1].rows(schema.servers)[0]
    clouds[0].change(
        schema.idempotency_keys, schema.idempotency_keys.c.key == "k", server_id=row.id
    )
    again = create(clouds[0], {"Idempotency-Key": "k"})
    assert again["id"] == servers[1]["id"]
    assert again["adminPass"] != servers[1]["adminPass"]


@pytest.mark.parametrize("has_vault", [True, False])
def test_digest_of_idempotent_body_confirms_no_guessed_password(
    make_cloud: Callable[..., Cloud], has_vault: bool
) -> None:
    cloud = make_cloud(secret_key="a long random text" if has_vault else "")
    create(cloud, {"Idempotency-Key": "k"}, adminPass=SECRET)
    body = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1", "adminPass": SECRET}}
    [row] = cloud.rows(schema.idempotency_keys)
    plain = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
    assert row.digest != plain


def test_repeated_create_without_secret_key_shows_no_second_password(cloud: Cloud) -> None:
    first, again = (create(cloud, {"Idempotency-Key": "k"}) for _ in range(2))
    assert first.pop("adminPass")
    assert again == first
    given = [create(cloud, {"Idempotency-Key": "l"}, adminPass=SECRET) for _ in range(2)]
    assert given[0] == given[1]
    assert given[1]["adminPass"] == SECRET


def test_repeated_create_after_rotation_of_the_secret_key_answers_the_same(
    sealing: Cloud,
) -> None:
    first = create(sealing, {"Idempotency-Key": "k"})
    sealing.services.vault = Vault("another text, a long random text")
    assert create(sealing, {"Idempotency-Key": "k"}) == first
    sealing.services.vault = Vault("another text")
    body = {"server": {"name": "vm", "imageRef": IMAGE, "flavorRef": "1"}}
    lost = sealing.call("POST", "/servers", body, headers={"Idempotency-Key": "k"})
    assert lost.status_code == 409
