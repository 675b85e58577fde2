# SPDX-License-Identifier: Apache-2.0
"""``kilonova host drain`` as a process finds the world: a configuration file, messages, a scheduler, and Ctrl-C."""
from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import config, ids, states
from common.clock import Clock
from common.models import Flavor, HostInventory, Sync, SyncAnswer
from common.rpc import conductor as conductor_rpc
from common.rpc import scheduler as scheduler_rpc
from common.rpc.transport import Transport
from common.store import departures, guests, hosts, servers
from common.store.engine import Store
from common.wire import to_wire
from deploy.cli.hands import Stop
from deploy.cli.main import main
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from scheduler.service import OneAtATime, options

FLAVOR = Flavor("1", "m1.nano", 1, 128, 1)
HOST = HostInventory("QEMU", 7002000, "", 4, 8192, 100)


class Rung:
    """A conductor that only hears the bell."""

    def __init__(self) -> None:
        self.heard = threading.Event()

    def ring(self, neighbours: bool = False) -> None:
        self.heard.set()

    def loop_back(self) -> None:
        """Nobody sends it here."""

    def sync(self, request: Sync) -> tuple[SyncAnswer, None]:
        """No agent is here."""
        raise AssertionError(request.host)


@pytest.fixture
def conductor(upgraded_database: Callable[[str], str], tmp_path: Path) -> Iterator[Rung]:
    """Two hosts, a stopped server on the first, a scheduler; the conductor does not move anything."""
    url = upgraded_database("sqlite")
    (tmp_path / "kilonova.conf").write_text(f"[DEFAULT]\ntransport_url = kombu+memory://\n[database]\nurl = {url}\n")
    conf, store, rung = config.load(str(tmp_path / "kilonova.conf")), Store(url), Rung()
    for name in ("h1", "h2"):
        store.write(lambda tx, name=name: hosts.hello(tx, name, "boot", HOST))
    server = ids.new()
    store.write(lambda tx: servers.insert(tx, [{
        "id": server, "project_id": "p", "user_id": "u", "name": "web", "hostname": "web", "vm_state": states.STOPPED,
        "host": "h1", "flavor": to_wire(FLAVOR), "flavor_id": "1", "vcpus": 1, "memory_mb": 128, "disk_gb": 1,
        "meta": {}, "tags": [], "scheduler_hints": {}, "security_groups": [], "reservation_id": "r"}]))
    store.write(lambda tx: guests.add(tx, [{"server_id": server, "host": "h1", "fence": 1, "wanted": guests.STOPPED,
                                            "may_run": False}]))
    transport = Transport(conf)
    scheduler_rpc.serve(transport, "s1/1", OneAtATime(Proposals(Hosts(store, Clock()), options(conf))))
    conductor_rpc.serve(transport, "c1/1", rung)
    yield rung
    transport.close()
    store.close()


def test_it_plans_begins_rings_and_is_interrupted(conductor: Rung, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                  ) -> None:
    """Twice Ctrl-C: what is under way is in the database, and goes on without it."""
    command = ["--config", str(tmp_path / "kilonova.conf"), "host", "drain", "h1"]
    before = signal.getsignal(signal.SIGINT)                    # what runs behind is begun with Ctrl-C ignored
    assert main([*command, "--dry-run"]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[1].endswith("web stopped cold h2") and said[2] == "1 of 1 would go; nothing was changed"
    assert not conductor.heard.is_set()

    def press() -> None:
        assert conductor.heard.wait(20)
        command_s = signal.getsignal(signal.SIGINT)
        assert isinstance(command_s, Stop)
        os.kill(os.getpid(), signal.SIGINT)
        while not command_s.wanted:
            threading.Event().wait(0.01)                        # two at once would be one
        if signal.getsignal(signal.SIGINT) is command_s:
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
    assert main(command) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("interrupted: what is under way goes on by itself")
    store = Store(config.load(command[1]).database.url)
    look = store.read(lambda tx: departures.look(tx, "h1"))
    store.close()
    assert [(move.status, move.by) for move in look.leaving] == [("accepted", "kilonova host drain")]
    assert look.host.disabled
    assert signal.getsignal(signal.SIGINT) is before
