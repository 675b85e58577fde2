# SPDX-License-Identifier: Apache-2.0
"""Attacks at the broker with the stolen credentials of one host, or of the API.

The attacks must not change a guest of another host.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from amqp.exceptions import AccessRefused

from common.domain import errors, states
from common.domain.command_key import CommandKey, CommandKind
from common.domain.models import Command, DomainState, HostInventory, Result
from common.domain.wire import to_wire
from common.rpc.broker import opener
from common.rpc.host_messages import pack
from common.security.broker_names import PREFIX, host_queue
from common.security.host_keys import HostKey, Purpose, derive
from common.service.config import load
from tests.attacks.target import ADMIN, Outcome, Target
from tests.broker_attempts import attempts
from tests.thief import Thief
from tests.waiting import await_true

#: A fence above all others.
HIGH = 2**40
ONE_HOST = "this cloud has one host"


def permissions(target: Target) -> Iterator[Outcome]:
    """With a host's user at the broker: read other hosts' queues, and send in their names."""
    stolen = target.stolen
    other = target.hosts[1].name if len(target.hosts) > 1 else "another"
    connect = opener(stolen.conf, stolen.keys.transport_url)
    for purpose, attempt in attempts(stolen.name, other).items():
        with connect() as connection:
            try:
                attempt(connection.channel())
            except AccessRefused:
                yield Outcome(f"bus: {purpose}")
            else:
                yield Outcome(f"bus: {purpose}", "the broker permits this")


def reports(target: Target) -> Iterator[Outcome]:
    """With a host's key: report another host's guest, replay messages, use another host's name."""
    if len(target.hosts) < 2:
        yield Outcome("bus: forged reports", untried=ONE_HOST)
        return
    other = target.hosts[1].name
    with target.create_server(other) as guest:
        before = target.read_state(guest)
        with target.suspend_agent(target.stolen), _open_thief(target) as thief:
            for power in (states.SHUTDOWN, states.RUNNING, states.CRASHED):
                thief.send_report(changed=[DomainState(guest, power, HIGH)])
                thief.send_report(domains=[DomainState(guest, power, HIGH)])
            for status in ("done", "failed", "refused", "unknown"):
                keys = [
                    f"do/{number}/{step}/1" for number in range(50) for step in ("build", "destroy")
                ]
                thief.send_report(
                    results=[Result(key, guest, HIGH, status, known_fence=HIGH) for key in keys]
                )
            yield from _replay_registrations(thief)
            yield _expect_no_answer(
                "bus: report in another host's name with the stolen host's key",
                lambda: thief.send_report(
                    host=other, changed=[DomainState(guest, states.SHUTDOWN, HIGH)]
                ),
            )
        yield _expect_no_change(
            target, "bus: forged reports change another host's guest", guest, before
        )


def terminal(target: Target) -> Iterator[Outcome]:
    """With a host's key: report names with escape sequences for the operator's terminal."""
    forged = "vm\x1b]0;PWNED\x07\x1b[2J\r\nFAKE LINE \x9b31m"
    with target.suspend_agent(target.stolen), _open_thief(target) as thief:
        thief.send_report(
            inventory=HostInventory("QEMU", 7002022, forged, 2, 2048, 20, facts={"a": forged})
        )
        answer = target.call("GET", "/os-hypervisors", cloud=ADMIN).json()["hypervisors"]
        names = [hypervisor["hypervisor_hostname"] for hypervisor in answer]
        is_accepted = any("FAKE LINE" in name for name in names)
        raw = [name for name in names if not name.isprintable()]
        yield Outcome(
            "bus: escape sequences in the name of a host",
            f"stored as {raw}" if raw else "",
            "" if is_accepted else "the conductor did not accept the report",
        )


def hypervisors(target: Target) -> Iterator[Outcome]:
    """With a host's key: report the name of another host's hypervisor."""
    attack = "bus: report the name of another host's hypervisor"
    if len(target.hosts) < 2:
        yield Outcome(attack, untried=ONE_HOST)
        return

    def names_by_host() -> dict[str, str]:
        answer = target.call("GET", "/os-hypervisors/detail", cloud=ADMIN).json()["hypervisors"]
        return {
            hypervisor["service"]["host"]: hypervisor["hypervisor_hostname"]
            for hypervisor in answer
        }

    others_name = names_by_host()[target.hosts[1].name]
    with target.suspend_agent(target.stolen), _open_thief(target) as thief:
        thief.send_report(inventory=HostInventory("QEMU", 7002022, others_name, 2, 2048, 20))
        holders = sorted(host for host, name in names_by_host().items() if name == others_name)
    yield Outcome(attack, "" if holders == [target.hosts[1].name] else f"{holders} have this name")


def _open_thief(target: Target) -> Any:
    stolen = target.stolen
    return closing(Thief(stolen.conf, stolen.keys))


def _replay_registrations(thief: Thief) -> Iterator[Outcome]:
    """Register with a cookie that is used up or random, and report with a guessed session."""
    first = thief.last
    for title, fields in {
        "registration with a cookie that is used up": {"session": 0, "cookie": thief.spent},
        "registration with a random cookie": {"session": 0, "cookie": secrets.token_hex(32)},
        "report with the number of the next session": {
            "session": first.session + 1,
            "cookie": first.cookie,
        },
    }.items():
        answer = thief.send_report(
            inventory=HostInventory("QEMU", 7002022, thief.host, 2, 2048, 20), **fields
        )
        yield Outcome(f"bus: {title}", "the conductor accepts it" * bool(answer.session))


def _expect_no_answer(attack: str, send: Callable[[], object]) -> Outcome:
    """Send a message, which is broken if a conductor answers."""
    try:
        send()
    except errors.NoAnswer:
        return Outcome(attack)
    return Outcome(attack, "the conductor answered")


def _expect_no_change(target: Target, attack: str, server: str, before: dict[str, Any]) -> Outcome:
    """Return the outcome after five seconds, which is broken if the server changed meanwhile."""
    try:
        await_true(lambda: target.read_state(server) != before, 5, pause=0.5)
    except AssertionError:
        return Outcome(attack)
    return Outcome(attack, f"{before} became {target.read_state(server)}")


def commands(target: Target) -> Iterator[Outcome]:
    """With the API's user at the broker and its query secret: delete another host's guest.

    The API's user may write to every queue, but the API has only keys for queries.
    """
    other = target.hosts[-1]
    file = next(iter(sorted(target.control.parent.glob("kilonova-api.conf"))), target.control)
    conf = load(str(file))
    with (
        target.create_server(other.name) as guest,
        opener(conf, conf.transport_url)() as connection,
    ):
        before, channel = target.read_state(guest), connection.channel()
        keys = _forge_keys(target, other.keys.generation, conf.host_keys.query_secret)
        for kind, key in keys.items():
            for verb in ("ensure_absent", "stop"):
                forged = CommandKey(CommandKind.DO, secrets.token_hex(16), "destroy", 1)
                command = Command(forged, guest, HIGH, 0, verb, {"keep_files": False})
                content = {"commands": to_wire([command]), "access": None}
                body = pack(key, "do", content)[1]
                for _ in range(2):
                    channel.basic_publish(
                        channel.prepare_message(body, content_encoding="binary"),
                        exchange="",
                        routing_key=host_queue(PREFIX, other.name),
                    )
            yield _expect_no_change(
                target, f"bus: forged command, sealed with {kind}", guest, before
            )


def _forge_keys(target: Target, generation: int, query_secret: str) -> dict[str, HostKey]:
    """Return wrong keys for commands to the last host, by their description."""
    name = target.hosts[-1].name
    keys = {
        "a random key": HostKey(name, generation, Purpose.COMMAND, secrets.token_bytes(32)),
        "the API's key for queries": derive(query_secret, name, generation, Purpose.QUERY),
        "the API's key for queries, with the purpose of commands": replace(
            derive(query_secret, name, generation, Purpose.QUERY), purpose=Purpose.COMMAND
        ),
    }
    if len(target.hosts) > 1:
        own = target.stolen.keys.newest(target.stolen.name, Purpose.COMMAND)
        keys["another host's key"] = own
        keys["another host's key, with the name of the attacked host"] = replace(
            own, host=name, generation=generation
        )
    return keys
