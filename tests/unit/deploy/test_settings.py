# SPDX-License-Identifier: Apache-2.0
"""The settings of a running cloud, which ``up`` refuses to change."""

from __future__ import annotations

import fcntl
import json
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
    """Return a cloud with an external database and with stored settings, as after a start."""
    new_cloud = Cloud(tmp_path, hosts=("h1",), database_url=SECRET)
    new_cloud.run.mkdir()
    settings.remember(new_cloud)
    return new_cloud


@pytest.fixture
def running(cloud: Cloud) -> Iterator[Cloud]:
    """Yield the cloud while the lock of the supervisor is held, as by a running supervisor."""
    with (cloud.run / "supervise.lock").open("w") as lock:
        lock.write("1\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield cloud


def make_variants(cloud: Cloud) -> dict[str, Cloud]:
    """Return the cloud with one setting changed, by the variable that ``up`` names."""
    return {
        "KILONOVA_NETWORKS=yes": replace(cloud, networks=False),
        "KILONOVA_VOLUMES=no": replace(cloud, volumes=True),
        "KILONOVA_DRIVER=libvirt": replace(cloud, driver="memory", networks=True),
        "KILONOVA_HOSTS=1": replace(cloud, hosts=("h1", "h2")),
        "KILONOVA_PORT_BASE": replace(cloud, ports=Ports.from_base(20000)),
        "KILONOVA_TRANSPORT_URL": replace(cloud, broker_url="rabbit://u:p@127.0.0.1:1/"),
        "KILONOVA_DATABASE_URL": replace(cloud, database_url=None),
    }


def test_up_on_running_cloud_refuses_and_names_changed_variable(running: Cloud) -> None:
    for variable, other in make_variants(running).items():
        assert settings.find_changes(other) == [variable]
        with pytest.raises(Failure) as caught:
            preflight.check_settings(other)
        assert variable in caught.value.what and "./deploy/down" in caught.value.todo
    assert settings.of(running).keys() == {
        variable.partition("=")[0] for variable in make_variants(running)
    }


def test_up_on_running_cloud_accepts_same_settings_and_other_options(running: Cloud) -> None:
    other = (("DEFAULT", "shelved_offload_time", 5),)
    for same in (running, replace(running, networks=True), replace(running, options=other)):
        preflight.check_settings(same)


def test_up_on_stopped_cloud_accepts_any_settings(cloud: Cloud) -> None:
    for other in make_variants(cloud).values():
        preflight.check_settings(other)


def test_up_on_running_cloud_without_settings_file_accepts_changes(running: Cloud) -> None:
    (running.run / settings.FILE).unlink()
    for other in make_variants(running).values():
        preflight.check_settings(other)


def test_up_accepts_cloud_started_by_release_without_a_variable(running: Cloud) -> None:
    stored = settings.of(running)
    del stored["KILONOVA_VOLUMES"]
    (running.run / settings.FILE).write_text(json.dumps(stored))
    preflight.check_settings(running)
    assert settings.find_changes(replace(running, hosts=("h1", "h2"))) == ["KILONOVA_HOSTS=1"]


def test_settings_file_has_no_password_of_url(cloud: Cloud) -> None:
    assert "secret" not in (cloud.run / settings.FILE).read_text()
