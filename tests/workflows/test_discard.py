# SPDX-License-Identifier: Apache-2.0
"""A guest without a record is removed by a debt that an operator makes of it."""

from __future__ import annotations

import pytest

from common import errors
from common.store.servers import guests
from tests.workflows.simulator import Cloud
from tests.workflows.test_lost_commits import everything, running


def test_a_guest_without_a_record_is_removed(cloud: Cloud) -> None:
    """Its host knows a higher fence than the database, which takes it in."""
    cloud.round()
    set_back = everything(cloud)
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for key in ("os-stop", "os-start"):
        cloud.ask(server, key)
        cloud.settle()
    set_back()
    cloud.hosts["h1"].restart()
    for _ in range(65):
        cloud.round()
    assert running(cloud, server) == ["h1"]
    cloud.store.write(lambda tx: guests.discard(tx, server, "h1"))
    for _ in range(65):
        cloud.round()
    assert (cloud.domains(server), cloud.findings()) == ([], [])


def test_a_guest_with_a_record_is_not(cloud: Cloud) -> None:
    cloud.round()
    server = cloud.create(host="h1", forced=True, networks=[])[0]
    cloud.settle()
    for host in ("h1", "h2"):
        with pytest.raises(errors.Conflict):
            cloud.store.write(lambda tx, host=host: guests.discard(tx, server, host))  # type: ignore[misc]
    cloud.settle()
    assert running(cloud, server) == ["h1"]
