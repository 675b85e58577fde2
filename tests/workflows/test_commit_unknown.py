# SPDX-License-Identifier: Apache-2.0
"""Conductors whose connection breaks at COMMIT: the next round goes on from where the database says
it is.

In each case another COMMIT of a create and a delete is carried out and not answered.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store import schema
from tests.faults import lose_commit_answer
from tests.workflows.frozen import register
from tests.workflows.simulator import Cloud


def work_through(cloud: Cloud) -> None:
    """As the threads do: a round that fails is followed by the next."""
    try:
        cloud.settle()
    except errors.Unavailable:
        cloud.settle()


@pytest.mark.parametrize(
    ("losing", "after"),
    [
        *(("create", number) for number in range(6)),
        *(("delete", number) for number in range(7)),
    ],
)
def test_a_round_of_a_conductor_is_done_once(cloud: Cloud, losing: str, after: int) -> None:
    register(cloud)
    server = cloud.create()[0]
    for doing in ("create", "delete"):
        if doing == "delete":
            assert (cloud.show(server).vm_state, len(cloud.networks.held)) == (states.ACTIVE, 1)
            cloud.ask(server, doing)
        with lose_commit_answer(cloud.store, after=after if doing == losing else 1000) as lost:
            work_through(cloud)
        assert bool(lost) == (doing == losing)
    events = cloud.store.read(lambda tx: tx.execute(sa.select(schema.events)).all())
    succeeded = Counter(
        (row.action_id, row.step, row.attempt) for row in events if row.event == "succeeded"
    )
    assert set(succeeded.values()) == {1}
    assert cloud.show(server).deleted == 1
    assert cloud.findings() == []


def test_guests_of_a_booted_host_are_started_once(cloud: Cloud) -> None:
    register(cloud)
    server = cloud.create()[0]
    cloud.settle()
    host = cloud.hosts[cloud.show(server).host]
    host.driver.host.power_off(server)
    host.restart()
    host.agent.boot_id = "another"
    with lose_commit_answer(cloud.store) as lost, suppress(errors.Unsure):
        cloud.sync(host)
    cloud.settle()
    reboots = cloud.store.read(
        lambda tx: tx.execute(
            sa.select(schema.actions).where(schema.actions.c.name == "reboot")
        ).all()
    )
    assert (len(lost), len(reboots), cloud.show(server).vm_state) == (1, 1, states.ACTIVE)
