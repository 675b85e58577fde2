# SPDX-License-Identifier: Apache-2.0
"""A running cloud keeps the settings that it was started with; what was set otherwise is told by
name."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.one_machine import preflight
from deploy.one_machine.cloud import settings
from deploy.one_machine.cloud.cloud import Cloud, Ports
from deploy.progress import Failure

SECRET = "mysql+pymysql://kilonova:secret@127.0.0.1/kilonova"


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    """One that has been started, with a database of its own."""
    made = Cloud(tmp_path, hosts=("h1",), database_url=SECRET)
    made.run.mkdir()
    settings.remember(made)
    return made


@pytest.fixture
def running(cloud: Cloud) -> Iterator[Cloud]:
    """It runs: somebody holds the lock of its supervisor."""
    with (cloud.run / "supervise.lock").open("w") as lock:
        lock.write("1\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cloud


def others(cloud: Cloud) -> dict[str, Cloud]:
    """How it is told -> the cloud with that one set otherwise."""
    return {
        "KILONOVA_NETWORKS=yes": replace(cloud, networks=False),
        "KILONOVA_VOLUMES=no": replace(cloud, volumes=True),
        "KILONOVA_DRIVER=libvirt": replace(cloud, driver="memory", networks=True),
        "KILONOVA_HOSTS=1": replace(cloud, hosts=("h1", "h2")),
        "KILONOVA_PORT_BASE": replace(cloud, ports=Ports.from_base(20000)),
        "KILONOVA_TRANSPORT_URL": replace(cloud, broker_url="rabbit://u:p@127.0.0.1:1/"),
        "KILONOVA_DATABASE_URL": replace(cloud, database_url=None),
    }


def test_each_variable_that_differs_is_told_by_name(running: Cloud) -> None:
    for told, other in others(running).items():
        assert settings.find_changes(other) == [told]
        with pytest.raises(Failure) as caught:
            preflight.check_settings(other)
        assert told in caught.value.what and "./deploy/down" in caught.value.todo
    assert settings.of(running).keys() == {told.partition("=")[0] for told in others(running)}


def test_same_settings_and_other_facts_of_the_cloud_are_fine(running: Cloud) -> None:
    other = (("DEFAULT", "shelved_offload_time", 5),)
    for same in (running, replace(running, networks=True), replace(running, options=other)):
        preflight.check_settings(same)


def test_stopped_cloud_takes_any_settings(cloud: Cloud) -> None:
    for other in others(cloud).values():
        preflight.check_settings(other)


def test_cloud_started_before_settings_were_remembered_is_let_be(running: Cloud) -> None:
    (running.run / settings.FILE).unlink()
    for other in others(running).values():
        preflight.check_settings(other)


def test_password_in_a_url_is_not_written(cloud: Cloud) -> None:
    assert "secret" not in (cloud.run / settings.FILE).read_text()
