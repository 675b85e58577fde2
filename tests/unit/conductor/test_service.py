# SPDX-License-Identifier: Apache-2.0
"""The conductor's messages, cleanup thread and syncs, without sockets."""

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
    """A transport and host link in memory that records casts and takes answers from a list."""

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


def new_messages(wire: Wire, key: str = "key") -> Messages:
    return Messages(wire, wire, Gateway("http://gateway", Tickets(Vault(key))))  # type: ignore[arg-type]  # Wire has the used methods.


def read_access(access: dict[str, str]) -> tuple[str, str, set[str], set[str]]:
    """Return the URL of an access and its ticket's host, images to read and images to write."""
    ticket = Tickets(Vault("key")).check(access["token"])
    return access["url"], ticket.host, set(ticket.reads), set(ticket.writes)


def build_command(image: str | None = None) -> Command:
    """Return the command that creates a guest, with this image or without an image."""
    guest = replace(VALUES["guest"], image=image and ImageRef(image))
    return new_command(EnsureGuest(guest=guest))


def test_select_calls_the_scheduler_once_without_a_retry() -> None:
    selection = Selection("s", ["h1"])
    wire = Wire(errors.NoAnswer("silence"), [to_wire(selection)])
    with pytest.raises(errors.NoAnswer):
        new_messages(wire).select([SPEC], False)
    assert wire.calls == [(scheduler.TOPIC, "select", scheduler.TIMEOUT)]
    assert new_messages(wire).select([SPEC], True) == [selection]


def test_do_message_has_image_ticket_only_for_images_of_its_commands() -> None:
    wire = Wire()
    messages = new_messages(wire)
    messages.do("h1", [build_command(), new_command("ensure_stopped")])
    assert wire.casts[0][2]["access"] is None
    messages.do("h1", [build_command("i"), build_command()])
    assert read_access(wire.casts[1][2]["access"]) == ("http://gateway", "h1", {"i"}, set())
    assert [(method, server) for method, server, _ in wire.casts] == [("do", "h1")] * 2


def test_do_message_with_images_is_not_sent_without_ticket_secret() -> None:
    wire = Wire()
    new_messages(wire, key="").do("h1", [build_command("i")])
    assert wire.casts == []


def test_messages_to_host_are_split_at_maximum_images_of_image_ticket() -> None:
    wire = Wire()
    commands = [build_command(f"i{number}") for number in range(MOST + 1)]
    new_messages(wire).do("h1", commands)
    new_messages(wire).cache_images(
        "h1", [ImageRef(f"i{number}", "raw") for number in range(MOST + 1)]
    )
    assert [
        len(arguments.get("commands", arguments.get("images"))) for _, _, arguments in wire.casts
    ] == [MOST, 1] * 2
    assert [read_access(arguments["access"])[2] for _, _, arguments in wire.casts[1::2]] == [
        {f"i{MOST}"}
    ] * 2
    assert wire.casts[0][2]["commands"] == to_wire(commands[:MOST])


def test_cache_images_message_has_image_ticket_and_needs_ticket_secret() -> None:
    wire, image = Wire(), ImageRef("i", "raw")
    new_messages(wire).cache_images("h1", [image])
    [(method, host, arguments)] = wire.casts
    assert (method, host, arguments["images"]) == ("cache_images", "h1", to_wire([image]))
    assert read_access(arguments["access"]) == ("http://gateway", "h1", {"i"}, set())
    new_messages(wire, key="").cache_images("h1", [image])
    assert len(wire.casts) == 1


def test_cleanup_thread_continues_after_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service, "CLEANUP_SECONDS", 0.01)
    store, networks = upgrade(Store(f"sqlite:///{tmp_path}/k.db")), Networks()
    engine = WorkflowEngine(
        store,
        Clock(),
        Wire(),  # type: ignore[arg-type]  # No message is sent.
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

    def fail_then_write(work: Any) -> Any:
        if failures:
            raise failures.pop()
        engine.networks = networks
        return write(work)

    monkeypatch.setattr(store, "write", fail_then_write)
    conductor = Conductor(engine, new_messages(Wire()), FRESHNESS)
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
        new_messages(Wire()),  # type: ignore[arg-type]
        FRESHNESS,
    )


def test_waiting_sync_is_refused_at_once_when_the_conductor_stops(
    conductor: Conductor,
) -> None:
    problems: list[Exception] = []

    def send_sync() -> None:
        try:
            conductor.sync(Sync("h1", 1, cookie=FRESHNESS.cookie("h1", 1)))
        except errors.Unavailable as problem:
            problems.append(problem)

    sync_thread = threading.Thread(target=send_sync)
    sync_thread.start()
    sync_thread.join(0.2)
    assert sync_thread.is_alive(), "the sync did not wait for an answer"
    conductor.close()
    sync_thread.join(5)
    assert not sync_thread.is_alive()
    assert "stopping" in str(problems[0])


def test_sync_to_stopped_conductor_raises_unavailable(conductor: Conductor) -> None:
    conductor.close()
    with pytest.raises(errors.Unavailable, match="Send the request again"):
        conductor.sync(Sync("h1", 1, cookie=FRESHNESS.cookie("h1", 1)))


@pytest.fixture
def conductor_with_host(tmp_path: Path) -> Iterator[Conductor]:
    """Yield a conductor with the registered host h1 and a thread that takes reports."""
    store = upgrade(Store(f"sqlite:///{tmp_path}/k.db"))
    inventory = HostInventory("QEMU", 7002000, "h1", 1, 1, 1)
    store.write(lambda tx: hosts.register(tx, "h1", "boot", inventory))
    conductor = Conductor(
        WorkflowEngine(
            store,
            Clock(),
            Wire(),  # type: ignore[arg-type]  # No message is sent.
            "c1/1",
            workflows=WORKFLOWS,
            notices=notifications.of,
        ),
        new_messages(Wire()),
        FRESHNESS,
    )  # type: ignore[arg-type]
    reports_thread = threading.Thread(target=conductor.take_reports, daemon=True)
    reports_thread.start()
    yield conductor
    conductor.close()
    reports_thread.join(5)
    store.close()


def session_of(conductor: Conductor) -> int:
    return conductor.engine.store.read(lambda tx: hosts.sessions(tx, ["h1"]))["h1"]


def test_registration_with_used_cookie_begins_no_session(conductor_with_host: Conductor) -> None:
    registration = Sync("h1", 0, "boot", inventory=HostInventory("QEMU", 7002000, "h1", 1, 1, 1))
    refused, _ = conductor_with_host.sync(registration)
    assert (refused.session, refused.cookie) == (
        0,
        FRESHNESS.cookie("h1", session_of(conductor_with_host)),
    )
    registration = replace(registration, cookie=refused.cookie)
    answer, _ = conductor_with_host.sync(registration)
    assert answer.session == session_of(conductor_with_host) != 0
    assert conductor_with_host.sync(registration)[0].session == 0
    assert answer.session == session_of(conductor_with_host)


def test_sync_and_heartbeat_with_old_cookie_are_refused(conductor_with_host: Conductor) -> None:
    session, measured = session_of(conductor_with_host), {"cpu.percent": 0.5}
    old = SyncCookies("secret", lambda: time.time() - 600).cookie("h1", session)
    assert (
        conductor_with_host.sync(Sync("h1", session, "boot", metrics=measured, cookie=old))[
            0
        ].session
        == 0
    )
    assert not conductor_with_host.heartbeat(Heartbeat("h1", session, cookie=old)).nothing
    answer = conductor_with_host.sync(
        Sync("h1", session, "boot", cookie=FRESHNESS.cookie("h1", session))
    )[0]
    assert answer.session == session and FRESHNESS.is_fresh("h1", session, answer.cookie)
    assert conductor_with_host.heartbeat(Heartbeat("h1", session, cookie=answer.cookie)).nothing


def test_sync_without_timely_answer_raises_unavailable(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread takes the reports, as if the database were too slow."""
    monkeypatch.setattr(service, "SYNC_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(errors.Unavailable, match="Send the report again"):
        conductor.sync(Sync("h1", 1, cookie=FRESHNESS.cookie("h1", 1)))
