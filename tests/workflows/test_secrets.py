# SPDX-License-Identifier: Apache-2.0
"""Injected files: sealed while the action lasts, with the guest when it is made, and nowhere when
the action has ended."""

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


def everything(cloud: Cloud) -> str:
    """All that the database holds."""
    return cloud.store.read(
        lambda tx: "".join(
            repr(tuple(row))
            for table in schema.metadata.sorted_tables
            for row in tx.execute(sa.select(table))
        )
    )


@pytest.fixture
def server(cloud: Cloud) -> str:
    """A create with injected files, accepted."""
    cloud.round()
    made = cloud.create()[0]
    sealed = cloud.engine.vault.seal({"admin_pass": "secret", "files": FILES})
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.actions).values(secrets=sealed)))
    return made


def test_files_come_with_the_guest_and_stay_nowhere(cloud: Cloud, server: str) -> None:
    cloud.lose = lambda kind: kind == "answer"  # the host's results are told again
    for _ in range(3):
        cloud.round()
        assert FILES[0]["contents"] not in everything(cloud)
    cloud.lose = lambda kind: False
    cloud.settle()
    made = [
        verb.guest.instance
        for _, command in cloud.sent
        if isinstance(verb := decode(command), EnsureGuest)
    ]
    assert [one["files"] for one in made] == [FILES] * len(made)
    assert cloud.show(server).vm_state == states.ACTIVE
    assert cloud.store.read(lambda tx: list(tx.scalars(sa.select(schema.actions.c.secrets)))) == [
        None
    ]


def test_an_action_that_is_superseded_keeps_none(cloud: Cloud, server: str) -> None:
    cloud.ask(server, "delete")
    cloud.settle()
    assert set(
        cloud.store.read(lambda tx: tx.scalars(sa.select(schema.actions.c.secrets)).all())
    ) == {None}


@pytest.mark.parametrize("end", ["done", "superseded", "settled"])
def test_what_stood_readable_goes_with_the_action(cloud: Cloud, end: str) -> None:
    """In a cloud without a key, for example, the former user data of a rebuild."""
    register(cloud)
    server = cloud.create()[0]
    args = {"before": {"name": "kept", "user_data": "Zm9ybWVy"}}

    def plant(tx: sa.Connection) -> None:
        row = tx.execute(sa.select(schema.actions)).one()
        tx.execute(sa.update(schema.actions).values(args={**row.args, **args}))

    cloud.store.write(plant)
    assert "Zm9ybWVy" in everything(cloud)
    if end == "settled":
        [action] = cloud.store.read(lambda tx: tx.scalars(sa.select(schema.actions.c.id)).all())
        cloud.store.write(
            lambda tx: tx.execute(sa.update(schema.actions).values(state="stuck", due_at=None))
        )
        cloud.store.write(lambda tx: stuck_actions.settle(tx, action, "Enough."))
    elif end == "superseded":
        cloud.ask(server, "delete")
    else:
        cloud.settle()
    found = everything(cloud)
    assert "Zm9ybWVy" not in found
    assert "kept" in found, "nothing else goes"


def test_user_data_that_a_refused_rebuild_replaced_is_back(cloud: Cloud) -> None:
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
    assert "Zm9ybWVy" not in everything(cloud)
    cloud.settle()
    row = cloud.show(server)
    assert (row.image_id, row.user_data, row.vm_state) == (None, "Zm9ybWVy", states.ACTIVE)


def test_sealed_user_data_comes_with_the_guest_as_it_was_given(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    kept = cloud.engine.vault.seal_text("Zm9ybWVy")
    cloud.store.write(lambda tx: tx.execute(sa.update(schema.servers).values(user_data=kept)))
    cloud.settle()
    made = [
        verb.guest.user_data
        for _, command in cloud.sent
        if isinstance(verb := decode(command), EnsureGuest)
    ]
    assert made == ["Zm9ybWVy"] and cloud.show(server).vm_state == states.ACTIVE
    assert "Zm9ybWVy" not in everything(cloud)
