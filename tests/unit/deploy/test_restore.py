# SPDX-License-Identifier: Apache-2.0
"""``kilonova host restore`` takes back what was done to a host, and says what; when an evacuation is refused."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.clock import SECOND
from common.models import HostInventory
from common.store import departures, hosts, schema, services
from common.store.departures import HostState
from common.store.engine import Store
from deploy.cli import drain
from deploy.cli.evacuate import too_many
from deploy.cli.hands import Stop
from deploy.cli.main import main, parser
from tests.schemas import upgrade

UP = HostState("h1", "uuid", up=True)
DRAINED = HostState("h1", "uuid", up=True, disabled=True, reason="drained by kilonova host drain since 2026-01-02")


@pytest.mark.parametrize(("state", "changes", "stays"), [
    (UP, {}, ""), (DRAINED, {"disabled": False, "disabled_reason": None}, ""),
    (HostState("h1", "uuid", up=True, disabled=True, reason="new disk"), {}, "but because: new disk"),
    (HostState("h1", "uuid", up=True, forced_down=True), {"forced_down": False}, ""),
    (HostState("h1", "uuid", up=False, forced_down=True), {}, "proves that its guests are dead"),
    (HostState("h1", "uuid", up=False, forced_down=True, fenced=True), {}, "it was fenced"),
    (HostState("h1", "uuid", up=False), {}, "it is silent")])
def test_what_is_taken_back_and_what_is_not(state: HostState, changes: dict[str, object], stays: str) -> None:
    found = drain.undo(state)
    assert found.changes == changes and bool(found.said) == bool(changes)
    assert [stays in one for one in found.stays] == ([True] if stays else [])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "kilonova.conf").write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")
    made = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(made)
    made.write(lambda tx: hosts.hello(tx, "h1", "boot", HostInventory("QEMU", 7002000, "", 4, 8192, 9)))
    yield made
    made.close()


def test_drained_and_restored(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> HostState:
        return store.read(lambda tx: departures.host_state(tx, "h1"))

    command = ["--config", str(tmp_path / "kilonova.conf"), "host", "restore"]
    assert "restore h1 takes that back" in store.write(lambda tx: drain.disable(tx, "h1"))
    assert state().reason.startswith("drained by kilonova host drain since 20")
    assert "is disabled already: drained by" in store.write(lambda tx: drain.disable(tx, "h1"))
    assert main([*command, "h1"]) == 0
    assert capsys.readouterr().out.startswith("host h1: enabled (was: drained by kilonova host drain since 20")
    assert not state().disabled and state().reason == ""
    assert main([*command, "h1"]) == 0
    assert capsys.readouterr().out == "host h1 is up and enabled: nothing to take back\n"
    assert main([*command, "h9"]) == 1
    assert "There is no host h9" in capsys.readouterr().err


def test_what_somebody_else_disabled_stays_disabled(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                    ) -> None:
    uuid = store.read(lambda tx: departures.host_state(tx, "h1")).service
    store.write(lambda tx: services.set_state(tx, uuid, disabled=True, disabled_reason="new disk"))
    assert store.write(lambda tx: drain.disable(tx, "h1")) == "host h1 is disabled already: new disk"
    assert main(["--config", str(tmp_path / "kilonova.conf"), "host", "restore", "h1"]) == 1
    assert "openstack compute service set --enable h1 nova-compute" in capsys.readouterr().out
    with store.begin() as tx:
        assert tx.scalar(sa.select(schema.services.c.disabled_reason)) == "new disk"


# --- evacuations that are likely a mistake ---
def cloud(number: int, silent: int = 0, forced: int = 0, late: int = 0) -> list[HostState]:
    made = [HostState(f"h{n}", "uuid", up=True, seen_at=100 * SECOND) for n in range(number - silent - forced - late)]
    made += [HostState(f"s{n}", "uuid", up=False, seen_at=0) for n in range(silent)]
    made += [HostState(f"f{n}", "uuid", up=True, forced_down=True, seen_at=100 * SECOND) for n in range(forced)]
    return made + [HostState(f"l{n}", "uuid", up=True, seen_at=60 * SECOND) for n in range(late)]


@pytest.mark.parametrize(("hosts", "refused"), [
    (cloud(5, silent=1), False), (cloud(5, silent=2), True), (cloud(4, silent=3), False), (cloud(10, silent=2), False),
    (cloud(10, silent=2, forced=1), True), (cloud(10, silent=1, late=2), True), (cloud(1, silent=1), False)])
def test_many_hosts_at_once_are_our_network(hosts: list[HostState], refused: bool) -> None:
    told = too_many(hosts, 100 * SECOND, 30)
    assert bool(told) is refused and (not refused or "--yes" in told)


# --- the command line ---
@pytest.mark.parametrize("words", [["drain", "h1", "--live", "--cold"], ["drain", "h1", "--parallel", "0"],
                                   ["drain"], ["evacuate", "h1", "--cold"], ["restore"]], ids=" ".join)
def test_a_wrong_command_line_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["host", *words])
    assert ended.value.code == 2 and "usage: kilonova" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["x", "0", "-1", "1.5", ""])
def test_a_number_that_is_none_is_refused_by_its_option(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["host", "drain", "h1", f"--parallel={number}"])
    assert f"argument --parallel: {number!r} is not a number from 1 on" in capsys.readouterr().err


def test_live_is_the_default() -> None:
    assert [parser().parse_args(["host", "drain", "h1", *words]).cold for words in ([], ["--live"], ["--cold"])] == [
        False, False, True]


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    stop = Stop()
    assert not stop.wanted
    stop(2, None)
    assert stop.wanted
    with pytest.raises(KeyboardInterrupt):
        stop(2, None)
