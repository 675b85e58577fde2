# SPDX-License-Identifier: Apache-2.0
"""``kilonova host drain`` with a configuration file, messages, a scheduler, and an interrupt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.domain import ids, states
from common.domain.clock import Clock
from common.domain.models import Flavor, HostInventory, Sync, SyncAnswer
from common.domain.statuses import GuestState
from common.domain.wire import to_wire
from common.rpc import conductor as conductor_rpc
from common.rpc import scheduler as scheduler_rpc
from common.rpc.transport import Transport
from common.service import config
from common.store.engine import Store
from common.store.hosts import host_actions, host_status, hosts
from common.store.hosts.host_actions import Name, State
from common.store.servers import guests, servers
from deploy.operator.hosts import actions as host_commands
from deploy.operator.main import main
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from scheduler.service import OneAtATime, options

FLAVOR = Flavor("1", "m1.nano", 1, 128, 1)
HOST = HostInventory("QEMU", 7002000, "", 4, 8192, 100)


class WakeupReceiver:
    """A conductor that receives wakeup messages and executes no actions."""

    def __init__(self) -> None:
        self.wakeup = threading.Event()

    def wake(self, service_calls: bool = False) -> None:
        self.wakeup.set()

    def loop_back(self) -> None:
        """Ignore the message, which this test does not send."""

    def sync(self, request: Sync) -> tuple[SyncAnswer, None]:
        """Fail the test, because no agent runs."""
        raise AssertionError(request.host)


@pytest.fixture
def conductor(upgraded_database: Callable[[str], str], tmp_path: Path) -> Iterator[WakeupReceiver]:
    """Yield the conductor of a cloud with a scheduler, two hosts, and a stopped server on h1."""
    url = upgraded_database("sqlite")
    (tmp_path / "kilonova.conf").write_text(
        f"[DEFAULT]\ntransport_url = kombu+memory://\n[database]\nurl = {url}\n"
    )
    conf, store, receiver = (
        config.load(str(tmp_path / "kilonova.conf")),
        Store(url),
        WakeupReceiver(),
    )
    for name in ("h1", "h2"):
        store.write(lambda tx, name=name: hosts.register(tx, name, "boot", HOST))
    server = ids.new()
    store.write(
        lambda tx: servers.insert(
            tx,
            [
                {
                    "id": server,
                    "project_id": "p",
                    "user_id": "u",
                    "name": "web",
                    "hostname": "web",
                    "vm_state": states.STOPPED,
                    "host": "h1",
                    "flavor": to_wire(FLAVOR),
                    "flavor_id": "1",
                    "vcpus": 1,
                    "memory_mb": 128,
                    "disk_gb": 1,
                    "meta": {},
                    "tags": [],
                    "scheduler_hints": {},
                    "security_groups": [],
                    "reservation_id": "r",
                }
            ],
        )
    )
    store.write(
        lambda tx: guests.add(
            tx,
            [
                {
                    "server_id": server,
                    "host": "h1",
                    "fence": 1,
                    "wanted": GuestState.STOPPED,
                    "may_run": False,
                }
            ],
        )
    )
    transport = Transport(conf)
    scheduler_rpc.serve(
        transport, "s1/1", OneAtATime(Proposals(Hosts(store, Clock()), options(conf)))
    )
    conductor_rpc.serve(transport, "c1/1", receiver)
    yield receiver
    transport.close()
    store.close()


def test_host_drain_continues_in_conductors_after_interrupt(
    conductor: WakeupReceiver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", str(tmp_path / "kilonova.conf"), "host", "drain", "h1"]
    assert main([*command, "--dry-run"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert (
        lines[1].endswith("web stopped cold h2")
        and lines[2] == "1 of 1 servers would move; nothing was changed"
    )
    assert not conductor.wakeup.is_set()

    def interrupt() -> None:
        assert conductor.wakeup.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    # A shell starts background jobs with SIGINT ignored, so the test sets the handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(command) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("the conductors continue without this command. To watch them")
    )
    store = Store(config.load(command[1]).database.url)
    state = store.read(lambda tx: host_status.host_state(tx, "h1"))
    [action] = store.read(lambda tx: host_actions.page(tx, "h1", 5))
    assert state.disabled and (action.name, action.state) == (Name.DRAIN, State.RUNNING)
    assert main([*command, "--stop"]) == 0
    assert f"action {action.id} starts no more moves" in capsys.readouterr().out
    assert store.read(lambda tx: host_actions.show(tx, action.id)).state is State.STOPPING
    store.close()


def test_host_drain_dry_run_reports_no_running_conductors_after_interrupt(
    conductor: WakeupReceiver,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*arguments: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_commands, "rehearse", interrupt)
    command = ["--config", str(tmp_path / "kilonova.conf"), "host", "drain", "h1", "--dry-run"]
    assert main(command) == 1
    assert capsys.readouterr().out == "the dry run was interrupted; nothing was changed\n"
