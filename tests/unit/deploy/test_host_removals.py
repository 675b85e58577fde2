# SPDX-License-Identifier: Apache-2.0
"""``kilonova host removals``: the guests that hosts still have to remove.

The output includes the resources that the guests hold, and the condition of their removal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain.models import HostInventory
from common.store import schema
from common.store.engine import Store
from common.store.hosts import hosts, services
from common.store.hosts.host_status import HostState
from common.store.placement import allocations
from common.store.servers import guests
from common.store.views.host_contents import PendingRemoval
from deploy.operator.hosts.removals import LATE, goes, state
from deploy.operator.main import main
from tests.schemas import upgrade

SERVER, OTHER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", "7a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b12"
MOVE = "8a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b13"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    new_store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(new_store)
    for name in ("a", "b"):
        new_store.write(
            lambda tx, name=name: hosts.register(
                tx, name, "boot", HostInventory("QEMU", 7002000, "", 4, 8192, 9)
            )
        )
    yield new_store
    new_store.close()


def add_pending_removal(store: Store, server: str, host: str, consumer: str) -> None:
    """Make the server's guest a pending removal that holds a VCPU and 512 MiB for the consumer."""
    with store.begin() as tx:
        request = allocations.ClaimRequest(
            consumer, "p", "u", {"VCPU": 1, "MEMORY_MB": 512}, [host]
        )
        allocations.claim(tx, [request])
        assert request.host == host
        guests.add(
            tx,
            [
                {
                    "server_id": server,
                    "host": host,
                    "fence": 1,
                    "holder": consumer if consumer != server else None,
                }
            ],
        )
        guests.add_removal(tx, server, 2, host=host)


def test_host_removals_is_empty_without_pending_removals(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), "host", "removals"]) == 0
    assert capsys.readouterr().out == "no host has a guest to remove\n"
    assert main(["--config", str(conf), "host", "removals", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_host_removals_lists_host_resources_and_condition_of_removals(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second removal belongs to a migration, which holds the resources at the source."""
    add_pending_removal(store, SERVER, "a", SERVER)
    add_pending_removal(store, OTHER, "b", MOVE)
    with store.begin() as tx:
        tx.execute(
            sa.update(schema.heartbeats).where(schema.heartbeats.c.host == "b").values(up=False)
        )
        services.fence(tx, "b")
    assert main(["--config", str(conf), "host", "removals", "--json"]) == 1
    entries = json.loads(capsys.readouterr().out)
    assert [
        (entry["server"], entry["host"], entry["host_state"], entry["holds"]) for entry in entries
    ] == [
        (SERVER, "a", "up", {"VCPU": 1, "MEMORY_MB": 512}),
        (OTHER, "b", "silent, fenced", {"VCPU": 1, "MEMORY_MB": 512}),
    ]
    assert "within seconds" in entries[0]["goes"] and "when the host is back" in entries[1]["goes"]
    assert main(["--config", str(conf), "host", "removals", "b"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "server name host since holds"
    assert lines[1].startswith(f"{OTHER} b 2") and lines[1].endswith("512 MEMORY_MB, 1 VCPU")
    assert lines[2] == "1 removals" and lines[3].startswith(
        "host b is silent, fenced; the guest is removed when the host is back"
    )


def test_host_removals_refuses_unknown_host(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), "host", "removals", "c"]) == 1
    assert "There is no host c" in capsys.readouterr().err


def test_late_removal_on_reachable_host_refers_to_its_agent_log() -> None:
    removal = PendingRemoval(SERVER, "web", HostState("a", "uuid", up=True, disabled=True), 0, {})
    assert "kilonova-agent there has the reason" in goes(removal, LATE)
    assert state(removal.host) == "up, disabled"
    assert "start its agent" in goes(
        PendingRemoval(SERVER, "web", HostState("gone", "", up=False), 0, {}), LATE
    )
