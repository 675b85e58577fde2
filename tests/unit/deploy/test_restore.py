# SPDX-License-Identifier: Apache-2.0
"""``kilonova host restore``, and the arguments of ``host drain`` and ``evacuate``.

The tests include the refusal of evacuations while many hosts are down.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain.clock import SECOND
from common.domain.models import HostInventory
from common.store import schema
from common.store.engine import Store
from common.store.hosts import host_actions, host_status, hosts, services
from common.store.hosts.host_actions import Arguments, Name, Progress, State
from common.store.hosts.host_status import HostState
from conductor.hosts.host_plan import too_many_down
from deploy.operator.hosts import restore as host_restore
from deploy.operator.hosts.actions import begin
from deploy.operator.main import main, parser
from tests.schemas import upgrade

UP = HostState("h1", "uuid", up=True)
DRAINED = HostState(
    "h1", "uuid", up=True, disabled=True, reason="drained by kilonova host drain since 2026-01-02"
)


@pytest.mark.parametrize(
    ("state", "changes", "stays"),
    [
        (UP, {}, ""),
        (DRAINED, {"disabled": False, "disabled_reason": None}, ""),
        (
            HostState("h1", "uuid", up=True, disabled=True, reason="new disk"),
            {},
            "but for this reason: new disk",
        ),
        (HostState("h1", "uuid", up=True, forced_down=True), {"forced_down": False}, ""),
        (
            HostState("h1", "uuid", up=False, forced_down=True),
            {},
            "proves that its guests are dead",
        ),
        (HostState("h1", "uuid", up=False, forced_down=True, fenced=True), {}, "it was fenced"),
        (HostState("h1", "uuid", up=False), {}, "it is silent"),
    ],
)
def test_host_restore_undoes_only_drain_and_forced_down_of_reporting_host(
    state: HostState, changes: dict[str, object], stays: str
) -> None:
    restoration = host_restore.plan_restoration(state)
    assert restoration.changes == changes and bool(restoration.done) == bool(changes)
    assert [stays in text for text in restoration.stays] == ([True] if stays else [])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "kilonova.conf").write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")
    new_store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(new_store)
    new_store.write(
        lambda tx: hosts.register(tx, "h1", "boot", HostInventory("QEMU", 7002000, "", 4, 8192, 9))
    )
    yield new_store
    new_store.close()


def run_drain(store: Store) -> str:
    """Begin and end a drain, and return the first message of the command."""
    messages: list[str] = []
    begin(store, "h1", Name.DRAIN, Arguments(), messages.append)
    end_drain(store)
    return messages[0]


def end_drain(store: Store) -> None:
    """End the drain like a conductor that finds the host empty."""
    [action] = store.write(lambda tx: host_actions.take(tx, "c1"))
    assert store.write(
        lambda tx: host_actions.record(tx, action.id, "c1", [], Progress(), ended=State.DONE)
    )


def test_host_restore_enables_drained_host(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> HostState:
        return store.read(lambda tx: host_status.host_state(tx, "h1"))

    command = ["--config", str(tmp_path / "kilonova.conf"), "host", "restore"]
    assert "restore h1 reverts this" in run_drain(store)
    assert state().reason.startswith("drained by kilonova host drain since 20")
    begin(store, "h1", Name.DRAIN, Arguments(), lambda text: None)
    assert main(["--config", str(tmp_path / "kilonova.conf"), "status"]) == 0
    assert (
        "host actions: 1\n  drain of h1, running: 0 moved, 0 under way, 0 to go\n"
        in capsys.readouterr().out
    )
    end_drain(store)
    assert "is disabled already: drained by" in run_drain(store)
    assert main([*command, "h1"]) == 0
    assert capsys.readouterr().out.startswith(
        "host h1: enabled (was: drained by kilonova host drain since 20"
    )
    assert not state().disabled and state().reason == ""
    assert main([*command, "h1"]) == 0
    assert capsys.readouterr().out == "host h1 is up and enabled: nothing to revert\n"
    assert main([*command, "h9"]) == 1
    assert "There is no host h9" in capsys.readouterr().err


def test_host_restore_keeps_host_disabled_for_another_reason(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uuid = store.read(lambda tx: host_status.host_state(tx, "h1")).service
    store.write(lambda tx: services.set_state(tx, uuid, disabled=True, disabled_reason="new disk"))
    assert run_drain(store) == "host h1 is disabled already: new disk"
    assert main(["--config", str(tmp_path / "kilonova.conf"), "host", "restore", "h1"]) == 1
    assert "openstack compute service set --enable h1 nova-compute" in capsys.readouterr().out
    with store.begin() as tx:
        assert tx.scalar(sa.select(schema.services.c.disabled_reason)) == "new disk"


# --- evacuations of several hosts, which are likely a mistake ---
def make_host_states(
    number: int, silent: int = 0, forced: int = 0, late: int = 0
) -> list[HostState]:
    host_states = [
        HostState(f"h{n}", "uuid", up=True, seen_at=100 * SECOND)
        for n in range(number - silent - forced - late)
    ]
    host_states += [HostState(f"s{n}", "uuid", up=False, seen_at=0) for n in range(silent)]
    host_states += [
        HostState(f"f{n}", "uuid", up=True, forced_down=True, seen_at=100 * SECOND)
        for n in range(forced)
    ]
    return host_states + [
        HostState(f"l{n}", "uuid", up=True, seen_at=60 * SECOND) for n in range(late)
    ]


@pytest.mark.parametrize(
    ("hosts", "refused"),
    [
        (make_host_states(5, silent=1), False),
        (make_host_states(5, silent=2), True),
        (make_host_states(4, silent=3), False),
        (make_host_states(10, silent=2), False),
        (make_host_states(10, silent=2, forced=1), True),
        (make_host_states(10, silent=1, late=2), True),
        (make_host_states(1, silent=1), False),
    ],
)
def test_evacuation_is_refused_when_too_many_hosts_are_down(
    hosts: list[HostState], refused: bool
) -> None:
    refusal = too_many_down(hosts, 100 * SECOND, 30)
    assert bool(refusal) is refused and (not refused or "--yes" in refusal)


# --- the command line ---
@pytest.mark.parametrize(
    "words",
    [
        ["drain", "h1", "--live", "--cold"],
        ["drain", "h1", "--parallel", "0"],
        ["drain"],
        ["evacuate", "h1", "--cold"],
        ["restore"],
    ],
    ids=" ".join,
)
def test_host_commands_with_wrong_arguments_exit_with_2_and_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parser().parse_args(["host", *words])
    assert exit_info.value.code == 2 and "usage: kilonova" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["x", "0", "-1", "1.5", ""])
def test_host_drain_refuses_parallel_other_than_number_from_1(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["host", "drain", "h1", f"--parallel={number}"])
    assert f"argument --parallel: {number!r} is not a number from 1 on" in capsys.readouterr().err


def test_host_drain_arguments_select_live_migration_unless_cold() -> None:
    assert [
        parser().parse_args(["host", "drain", "h1", *words]).cold
        for words in ([], ["--live"], ["--cold"])
    ] == [False, False, True]
