# SPDX-License-Identifier: Apache-2.0
"""Clouds that were prepared once and copied: a copy is what was prepared, and knows nothing of the
other copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import pytest
import sqlalchemy as sa

from common.store import schema
from compute_agent.virt.memory.state.script import Fail
from tests.schemas import memory_store
from tests.workflows.frozen import Frozen
from tests.workflows.scenarios import SCENARIOS, Trial, prepare, trial_of
from tests.workflows.simulator import Cloud, Host, Time

#: Shared storage, a host that is off, a cloud of another size, and in the slice a new cloud, images
#: and ports, a move.
KINDS = [
    "revert_resize:shared",
    "evacuate",
    "confirm_here",
    *(
        pytest.param(name, marks=pytest.mark.slice("operations"))
        for name in ("create", "unshelve", "live_migrate")
    ),
]


@pytest.fixture
def another() -> Iterator[Cloud]:
    """One more cloud."""
    time = Time()
    cloud = Cloud(memory_store(time), time)
    with closing(cloud.store):
        yield cloud


def told(cloud: Cloud) -> dict[str, Any]:
    """Everything that is known of a cloud."""
    rows = {
        table.name: cloud.store.read(
            lambda tx, table=table: sorted(map(repr, tx.execute(sa.select(table))))
        )
        for table in schema.metadata.sorted_tables
    }
    hosts = {name: told_of(host) for name, host in cloud.hosts.items()}
    networks = vars(cloud.networks) | {"numbers": list(copy.copy(cloud.networks.numbers))}
    beats = {
        name: value
        for name, value in vars(cloud.engine.heartbeats).items()
        if name not in ("_store", "_clock")
    }
    return copy.deepcopy(
        {
            "rows": rows,
            "hosts": hosts,
            "images": vars(cloud.images),
            "networks": networks,
            "beats": beats,
            "watch": cloud.watch,
            "locked": cloud.engine.locked_servers,
            "time": cloud.time.micros,
            "cut": cloud.cut,
            "cached": cloud.to_cache,
            "sent": cloud.sent,
        }
    )


def told_of(host: Host) -> dict[str, Any]:
    driver = host.driver
    guests = {
        name: {server: asdict(guest) for server, guest in found.items()}
        for name, found in (
            ("guests", driver.host.guests),
            ("files", driver.host.files),
            ("storage", driver.host.storage),
        )
    }
    agent = {
        name: value
        for name, value in vars(host.agent).items()
        if name not in ("_journal", "_clock")
    }
    return guests | {
        "agent": agent,
        "journal": list(host.journal._db.iterdump()),
        "is_on": host.is_on,
        "boot": driver.boot_id(),
        "size": driver.host.size,
        "calls": list(driver.host.calls),
        "incoming": driver.host.incoming,
        "images": driver.host.images,
        "reachable": sorted(driver.host.reachable),
    }


def wreck(trial: Trial) -> None:
    """The workflow runs to its end and leaves nothing as it was."""
    cloud = trial.cloud
    trial.begin()
    cloud.settle()
    trial.has_ended()
    cloud.ask(trial.server, "delete")
    cloud.settle()
    cloud.engine.max_attempts = 1
    cloud.networks.one_host_a_port = True
    cloud.images.refuses = "no room"
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail()]
        host.driver.host.images.add("an image")
        host.power_cut()
    cloud.round()


@pytest.mark.parametrize("workflow", KINDS)
def test_a_copy_is_what_was_prepared(cloud: Cloud, another: Cloud, workflow: str) -> None:
    made = prepare(cloud, workflow)
    copied = Frozen(cloud, made).pour(another)
    assert told(another) == told(cloud)
    assert copied.cloud is another and (copied.server, copied.was) == (made.server, made.was)
    for trial in (made, copied):
        trial.begin()
        trial.cloud.settle()
        trial.has_ended()


@pytest.mark.parametrize("workflow", KINDS)
def test_a_copy_sees_nothing_of_another_one(cloud: Cloud, another: Cloud, workflow: str) -> None:
    first, second = trial_of(cloud, workflow), trial_of(another, workflow)
    before = told(another)
    assert told(cloud) == before
    wreck(first)
    assert told(another) == before
    wreck(second)


@pytest.mark.parametrize("workflow", KINDS)
def test_a_later_copy_sees_nothing_of_an_earlier_one(
    cloud: Cloud, another: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    before = told(cloud)
    wreck(trial)
    trial_of(another, workflow)
    assert told(another) == before


def use(cloud: Cloud) -> None:
    cloud.create()


def tune(cloud: Cloud) -> None:
    cloud.engine.vif_plugging_timeout = 20


def tune_a_neighbour(cloud: Cloud) -> None:
    cloud.images.refuses = "no room"


def grow(cloud: Cloud) -> None:
    cloud.equip(3)


def script(cloud: Cloud) -> None:
    cloud.hosts["h2"].driver.host.script["ensure_guest"] = [Fail()]


@pytest.mark.parametrize("change", [Cloud.round, use, tune, tune_a_neighbour, grow, script])
def test_what_was_changed_before_a_trial_is_not_lost(
    cloud: Cloud, change: Callable[[Cloud], None]
) -> None:
    change(cloud)
    with pytest.raises(AssertionError, match="nobody has used or changed"):
        trial_of(cloud, "stop")


def test_what_would_be_shared_is_not_frozen(cloud: Cloud) -> None:
    cloud.lose = lambda kind: False
    with pytest.raises(AttributeError, match="lambda"):
        Frozen(cloud, None)


def test_every_workflow_is_prepared_once(
    cloud: Cloud, another: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_of(cloud, "stop")
    monkeypatch.delitem(SCENARIOS, "stop")
    trial_of(another, "stop")
