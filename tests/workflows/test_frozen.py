# SPDX-License-Identifier: Apache-2.0
"""Tests of ``Frozen``: a copy of a prepared cloud equals the original, and shares no state."""

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

#: Workflows with shared storage, with a dead host, and on a single host. The slice adds a new
#: cloud, images and ports, and a move.
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
def other_cloud() -> Iterator[Cloud]:
    time = Time()
    cloud = Cloud(memory_store(time), time)
    with closing(cloud.store):
        yield cloud


def read_cloud(cloud: Cloud) -> dict[str, Any]:
    """Return a copy of the whole state of a cloud."""
    rows = {
        table.name: cloud.store.read(
            lambda tx, table=table: sorted(map(repr, tx.execute(sa.select(table))))
        )
        for table in schema.metadata.sorted_tables
    }
    hosts = {name: read_host(host) for name, host in cloud.hosts.items()}
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


def read_host(host: Host) -> dict[str, Any]:
    driver = host.driver
    guests = {
        name: {server: asdict(guest) for server, guest in records.items()}
        for name, records in (
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


def change_state(trial: Trial) -> None:
    """Run the workflow to the end, and change as much of the cloud as possible."""
    cloud = trial.cloud
    trial.begin()
    cloud.settle()
    trial.check_expected_end()
    cloud.ask(trial.server, "delete")
    cloud.settle()
    cloud.engine.max_attempts = 1
    cloud.networks.has_single_bindings = True
    cloud.images.refuses = "no room"
    for host in cloud.hosts.values():
        host.driver.host.script["ensure_guest"] = [Fail()]
        host.driver.host.images.add("an image")
        host.power_cut()
    cloud.round()


@pytest.mark.parametrize("workflow", KINDS)
def test_copy_of_frozen_cloud_equals_prepared_cloud(
    cloud: Cloud, other_cloud: Cloud, workflow: str
) -> None:
    original = prepare(cloud, workflow)
    copy = Frozen(cloud, original).pour(other_cloud)
    assert read_cloud(other_cloud) == read_cloud(cloud)
    assert copy.cloud is other_cloud and (copy.server, copy.was) == (original.server, original.was)
    for trial in (original, copy):
        trial.begin()
        trial.cloud.settle()
        trial.check_expected_end()


@pytest.mark.parametrize("workflow", KINDS)
def test_copy_of_frozen_cloud_ignores_changes_to_concurrent_copy(
    cloud: Cloud, other_cloud: Cloud, workflow: str
) -> None:
    first, second = trial_of(cloud, workflow), trial_of(other_cloud, workflow)
    before = read_cloud(other_cloud)
    assert read_cloud(cloud) == before
    change_state(first)
    assert read_cloud(other_cloud) == before
    change_state(second)


@pytest.mark.parametrize("workflow", KINDS)
def test_copy_of_frozen_cloud_ignores_changes_to_earlier_copy(
    cloud: Cloud, other_cloud: Cloud, workflow: str
) -> None:
    trial = trial_of(cloud, workflow)
    before = read_cloud(cloud)
    change_state(trial)
    trial_of(other_cloud, workflow)
    assert read_cloud(other_cloud) == before


def create_server(cloud: Cloud) -> None:
    cloud.create()


def change_timeout(cloud: Cloud) -> None:
    cloud.engine.vif_plugging_timeout = 20


def refuse_images(cloud: Cloud) -> None:
    cloud.images.refuses = "no room"


def add_host(cloud: Cloud) -> None:
    cloud.equip(3)


def script_failure(cloud: Cloud) -> None:
    cloud.hosts["h2"].driver.host.script["ensure_guest"] = [Fail()]


@pytest.mark.parametrize(
    "change", [Cloud.round, create_server, change_timeout, refuse_images, add_host, script_failure]
)
def test_trial_of_raises_assertion_error_for_used_or_changed_cloud(
    cloud: Cloud, change: Callable[[Cloud], None]
) -> None:
    change(cloud)
    with pytest.raises(AssertionError, match="nobody has used or changed"):
        trial_of(cloud, "stop")


def test_frozen_raises_attribute_error_for_cloud_with_lambda(cloud: Cloud) -> None:
    cloud.lose = lambda kind: False
    with pytest.raises(AttributeError, match="lambda"):
        Frozen(cloud, None)


def test_trial_of_prepares_cloud_of_each_workflow_once(
    cloud: Cloud, other_cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial_of(cloud, "stop")
    monkeypatch.delitem(SCENARIOS, "stop")
    trial_of(other_cloud, "stop")
