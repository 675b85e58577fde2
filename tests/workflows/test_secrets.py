# SPDX-License-Identifier: Apache-2.0
"""Tests of secrets of actions: sealed in the database, sent to the host, deleted at the end."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from common.domain import states
from common.domain.verbs import EnsureGuest, decode
from common.store import schema
from deploy.operator.store import stuck_actions
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud

FILES = [{"path": "/etc/key", "contents": "c2VhbGVkIGZpbGU="}]


def read_database(cloud: Cloud) -> str:
    """Return the whole content of the database as text."""
    return cloud.store.read(
        lambda tx: "".join(
            repr(tuple(row))
            for table in schema.metadata.sorted_tables
            for row in tx.execute(sa.select(table))
        )
    )


@pytest.fixture
def server(cloud: Cloud) -> str:
    """Return a new server with a password and injected files. The create is not finished."""
    cloud.round()
    server_id = cloud.create()[0]
    sealed = cloud.engine.vault.seal({"admin_pass": "secret", "files": FILES})
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.actions).values(secrets=sealed)))
    return server_id


def test_create_sends_injected_files_and_deletes_them_at_end(cloud: Cloud, server: str) -> None:
    cloud.lose = lambda kind: kind == "answer"  # The host repeats its results.
    for _ in range(3):
        cloud.round()
        assert FILES[0]["contents"] not in read_database(cloud)
    cloud.lose = lambda kind: False
    cloud.settle()
    instances = [
        verb.guest.instance
        for _, command in cloud.sent
        if isinstance(verb := decode(command), EnsureGuest)
    ]
    assert [instance["files"] for instance in instances] == [FILES] * len(instances)
    assert cloud.show(server).vm_state == states.ACTIVE
    assert cloud.store.read(lambda tx: list(tx.scalars(sa.select(schema.actions.c.secrets)))) == [
        None
    ]


def test_create_superseded_by_delete_keeps_no_secrets(cloud: Cloud, server: str) -> None:
    cloud.ask(server, "delete")
    cloud.settle()
    assert set(
        cloud.store.read(lambda tx: tx.scalars(sa.select(schema.actions.c.secrets)).all())
    ) == {None}


@pytest.mark.parametrize("end", ["done", "superseded", "settled"])
def test_plain_user_data_in_action_is_deleted_at_its_end(cloud: Cloud, end: str) -> None:
    """Without a key, for example, a rebuild stores the previous user data unsealed."""
    register(cloud)
    server = cloud.create()[0]
    args = {"before": {"name": "kept", "user_data": "Zm9ybWVy"}}

    def add_plain_args(tx: sa.Connection) -> None:
        row = tx.execute(sa.select(schema.actions)).one()
        tx.execute(sa.update(schema.actions).values(args={**row.args, **args}))

    cloud.store.write(add_plain_args)
    assert "Zm9ybWVy" in read_database(cloud)
    if end == "settled":
        [action] = cloud.store.read(lambda tx: tx.scalars(sa.select(schema.actions.c.id)).all())
        cloud.store.write(
            lambda tx: tx.execute(sa.update(schema.actions).values(state="stuck", due_at=None))
        )
        cloud.store.write(lambda tx: stuck_actions.fail(tx, action, "Enough."))
    elif end == "superseded":
        cloud.ask(server, "delete")
    else:
        cloud.settle()
    content = read_database(cloud)
    assert "Zm9ybWVy" not in content
    assert "kept" in content, "the other arguments are kept"


def test_rebuild_with_unsupported_image_restores_user_data(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    cloud.settle()
    row = cloud.show(server)
    image = {
        **(row.image or {}),
        "id": "other",
        "disk_format": "raw",
        "size": 1,
        "properties": {"hw_architecture": "s390x"},
    }
    cloud.ask(
        server,
        "rebuild",
        args={"before": {"image_id": row.image_id, "image": row.image}},
        secrets={"before": {"user_data": "Zm9ybWVy"}},
        changes={"image_id": "other", "image": image, "user_data": "bmV3"},
    )
    assert "Zm9ybWVy" not in read_database(cloud)
    cloud.settle()
    row = cloud.show(server)
    assert (row.image_id, row.user_data, row.vm_state) == (None, "Zm9ybWVy", states.ACTIVE)


def test_create_sends_sealed_user_data_in_plain_text_to_host(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    sealed = cloud.engine.vault.seal_text("Zm9ybWVy")
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(user_data=sealed)))
    cloud.settle()
    user_data = [
        verb.guest.user_data
        for _, command in cloud.sent
        if isinstance(verb := decode(command), EnsureGuest)
    ]
    assert user_data == ["Zm9ybWVy"] and cloud.show(server).vm_state == states.ACTIVE
    assert "Zm9ybWVy" not in read_database(cloud)
