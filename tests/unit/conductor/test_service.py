# SPDX-License-Identifier: Apache-2.0
"""The conductor's edges without sockets: its post, and what becomes of a sync when it stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.domain import errors
from common.domain.clock import Clock
from common.domain.models import (
    Command,
    Heartbeat,
    HostInventory,
    ImageRef,
    RequestSpec,
    Selection,
    Sync,
)
from common.domain.verbs import EnsureGuest
from common.domain.wire import to_wire
from common.rpc import scheduler
from common.security.host_keys import Purpose
from common.security.image_tickets import MOST, Gateway, Tickets
from common.security.vault import Vault
from common.store import cleanups
from common.store.engine import Store
from common.store.hosts import hosts
from conductor import service
from conductor.engine.engine import Engine
from conductor.engine.workflow_engine import WorkflowEngine
from conductor.hosts.sync_cookies import SyncCookies
from conductor.notifications import notices as notifications
from conductor.service import Conductor, Messages
from conductor.workflows import WORKFLOWS
from tests.schemas import upgrade
from tests.verbs import VALUES, new_command
from tests.waiting import await_true
from tests.workflows.networks import Networks

SPEC = RequestSpec("s", "p", {"VCPU": 1})

FRESHNESS = SyncCookies("secret")


class Wire:
    """A transport and a link to hosts in memory: keeps casts, answers calls from a list."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.casts, self.calls = list(answers), [], []  # type: Any, list[Any], list[Any]

    def cast(self, host: str, method: str, purpose: Purpose, content: dict[str, Any]) -> bool:
        assert purpose is Purpose.COMMAND
        self.casts.append((method, host, content))
        return True

    def call(
        self,
        topic: str,
        method: str,
        server: str | None = None,
        timeout: float = 10,
        **arguments: Any,
    ) -> Any:
        self.calls.append((topic, method, timeout))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def post(wire: Wire, key: str = "key") -> Messages:
    return Messages(wire, wire, Gateway("http://gateway", Tickets(Vault(key))))  # type: ignore[arg-type]  # the same


def opened(access: dict[str, str]) -> tuple[str, str, set[str], set[str]]:
    """URL, host, and what may be read and written."""
    found = Tickets(Vault("key")).check(access["token"])
    return access["url"], found.host, set(found.reads), set(found.writes)


def build(image: str | None = None) -> Command:
    """The command that makes a guest, of this image or of none."""
    guest = replace(VALUES["guest"], image=image and ImageRef(image))
    return new_command(EnsureGuest(guest=guest))


def test_a_scheduler_is_asked_once_and_the_runner_asks_again() -> None:
    selection = Selection("s", ["h1"])
    wire = Wire(errors.NoAnswer("silence"), [to_wire(selection)])
    with pytest.raises(errors.NoAnswer):
        post(wire).select([SPEC], False)
    assert wire.calls == [(scheduler.TOPIC, "select", scheduler.TIMEOUT)]
    assert post(wire).select([SPEC], True) == [selection]


def test_commands_bring_a_ticket_for_their_images_alone() -> None:
    wire = Wire()
    messages = post(wire)
    messages.do("h1", [build(), new_command("ensure_stopped")])
    assert wire.casts[0][2]["access"] is None
    messages.do("h1", [build("i"), build()])
    assert opened(wire.casts[1][2]["access"]) == ("http://gateway", "h1", {"i"}, set())
    assert [(method, server) for method, server, _ in wire.casts] == [("do", "h1")] * 2


def test_command_that_needs_a_ticket_waits_where_no_secret_is() -> None:
    wire = Wire()
    post(wire, key="").do("h1", [build("i")])
    assert wire.casts == []


def test_more_images_than_a_ticket_opens_are_several_messages() -> None:
    wire = Wire()
    commands = [build(f"i{number}") for number in range(MOST + 1)]
    post(wire).do("h1", commands)
    post(wire).cache_images("h1", [ImageRef(f"i{number}", "raw") for number in range(MOST + 1)])
    assert [
        len(arguments.get("commands", arguments.get("images"))) for _, _, arguments in wire.casts
    ] == [MOST, 1] * 2
    assert [opened(arguments["access"])[2] for _, _, arguments in wire.casts[1::2]] == [
        {f"i{MOST}"}
    ] * 2
    assert wire.casts[0][2]["commands"] == to_wire(commands[:MOST])


def test_images_to_fetch_ahead_bring_a_ticket_or_wait() -> None:
    wire, image = Wire(), ImageRef("i", "raw")
    post(wire).cache_images("h1", [image])
    [(method, host, arguments)] = wire.casts
    assert (method, host, arguments["images"]) == ("cache_images", "h1", to_wire([image]))
    assert opened(arguments["access"]) == ("http://gateway", "h1", {"i"}, set())
    post(wire, key="").cache_images("h1", [image])
    assert len(wire.casts) == 1


def test_cleanups_are_tried_by_a_thread_that_outlives_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "CLEANUP_SECONDS", 0.01)
    store, networks = upgrade(Store(f"sqlite:///{tmp_path}/k.db")), Networks()
    engine = WorkflowEngine(
        store,
        Clock(),
        Wire(),  # type: ignore[arg-type]  # it posts nothing
        "c1/1",
        workflows=WORKFLOWS,
        notices=notifications.of,
    )
    store.write(
        lambda tx: cleanups.add(
            tx,
            [
                {
                    "kind": cleanups.PORTS,
                    "target": "s",
                    "place": "",
                    "args": {},
                    "server_id": "s",
                    "project_id": "p",
                    "why": "It is silent.",
                }
            ],
        )
    )
    networks.create(
        [{"network_id": "n1", "device_id": "s", "binding:profile": {"made_by": "kilonova"}}]
    )
    write, failures = (
        store.write,
        [RuntimeError("nobody foresaw this"), errors.Unavailable("the database is away")],
    )

    def failing(work: Any) -> Any:
        if failures:
            raise failures.pop()
        engine.networks = networks
        return write(work)

    monkeypatch.setattr(store, "write", failing)
    conductor = Conductor(engine, post(Wire()), FRESHNESS)
    thread = threading.Thread(target=conductor.clean_up, daemon=True)
    thread.start()
    await_true(lambda: store.read(cleanups.list_all) == [], 10, "the cleanup was not done")
    conductor.close()
    thread.join(5)
    assert (networks.held, thread.is_alive()) == ({}, False)
    store.close()


@pytest.fixture
def conductor() -> Conductor:
    return Conductor(
        Engine(Store("sqlite://"), Clock(), Wire(), "c1/1"),
        post(Wire()),  # type: ignore[arg-type]
        FRESHNESS,
    )


def test_a_sync_that_waits_when_the_conductor_stops_is_answered_at_once(
    conductor: Conductor,
) -> None:
    caught: list[Exception] = []

    def ask() -> None:
        try:
            conductor.sync(Sync("h1", 1, cookie=FRESHNESS.cookie("h1", 1)))
        except errors.Unavailable as problem:
            caught.append(problem)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(0.2)
    assert asking.is_alive(), "it did not wait for an answer"
    conductor.close()
    asking.join(5)
    assert not asking.is_alive()
    assert "stopping" in str(caught[0])


def test_a_conductor_that_has_stopped_takes_no_sync(conductor: Conductor) -> None:
    conductor.close()
    with pytest.raises(errors.Unavailable, match="ask again"):
        conductor.sync(Sync("h1", 1, cookie=FRESHNESS.cookie("h1", 1)))


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Conductor]:
    """A conductor whose database knows host h1."""
    store = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    inventory = HostInventory("QEMU", 7002000, "h1", 1, 1, 1)
    store.write(lambda tx: hosts.register(tx, "h1", "boot", inventory))
    conductor = Conductor(
        WorkflowEngine(
            store,
            Clock(),
            Wire(),  # type: ignore[arg-type]  # it posts nothing
            "c1/1",
            workflows=WORKFLOWS,
            notices=notifications.of,
        ),
        post(Wire()),
        FRESHNESS,
    )  # type: ignore[arg-type]
    taking = threading.Thread(target=conductor.take_reports, daemon=True)
    taking.start()
    yield conductor
    conductor.close()
    taking.join(5)
    store.close()


def session_of(conductor: Conductor) -> int:
    return conductor.engine.store.read(lambda tx: hosts.sessions(tx, ["h1"]))["h1"]


def test_a_registration_that_is_sent_again_begins_no_session(known: Conductor) -> None:
    registration = Sync("h1", 0, "boot", inventory=HostInventory("QEMU", 7002000, "h1", 1, 1, 1))
    refused, _ = known.sync(registration)
    assert (refused.session, refused.cookie) == (0, FRESHNESS.cookie("h1", session_of(known)))
    registration = replace(registration, cookie=refused.cookie)
    answer, _ = known.sync(registration)
    assert answer.session == session_of(known) != 0
    assert known.sync(registration)[0].session == 0
    assert answer.session == session_of(known)


def test_what_a_host_said_long_ago_is_not_taken_in(known: Conductor) -> None:
    session, seen = session_of(known), {"cpu.percent": 0.5}
    old = SyncCookies("secret", lambda: time.time() - 600).cookie("h1", session)
    assert known.sync(Sync("h1", session, "boot", metrics=seen, cookie=old))[0].session == 0
    assert not known.heartbeat(Heartbeat("h1", session, cookie=old)).nothing
    answer = known.sync(Sync("h1", session, "boot", cookie=FRESHNESS.cookie("h1", session)))[0]
    assert answer.session == session and FRESHNESS.is_fresh("h1", session, answer.cookie)
    assert known.heartbeat(Heartbeat("h1", session, cookie=answer.cookie)).nothing
