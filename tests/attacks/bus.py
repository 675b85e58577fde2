# SPDX-License-Identifier: Apache-2.0
"""What the thief of one host tries at the broker, and what the thief of the API's name there does.

Another host's guest must be afterwards as it was before.
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

HIGH = 2**40  #: a fence above all others
ONE_HOST = "this cloud has one host"


def permissions(target: Target) -> Iterator[Outcome]:
    """With one host's name at the broker: read others' queues, speak in their names."""
    stolen = target.stolen
    other = target.hosts[1].name if len(target.hosts) > 1 else "another"
    connect = opener(stolen.conf, stolen.keys.transport_url)
    for what, attempt in attempts(stolen.name, other).items():
        with connect() as connection:
            try:
                attempt(connection.channel())
            except AccessRefused:
                yield Outcome(f"bus: {what}")
            else:
                yield Outcome(f"bus: {what}", "the broker lets a host do it")


def reports(target: Target) -> Iterator[Outcome]:
    """With one host's key: reports of another host's guest, replays, another host's name."""
    if len(target.hosts) < 2:
        yield Outcome("bus: forged reports", untried=ONE_HOST)
        return
    other = target.hosts[1].name
    with target.server(other) as guest:
        before = target.account(guest)
        with target.silent(target.stolen), _thief(target) as thief:
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
            yield from _replays(thief)
            yield _refused(
                "bus: report in another host's name with one's own key",
                lambda: thief.send_report(
                    host=other, changed=[DomainState(guest, states.SHUTDOWN, HIGH)]
                ),
            )
        yield _unchanged(target, "bus: forged reports change another host's guest", guest, before)


def terminal(target: Target) -> Iterator[Outcome]:
    """With one host's key: texts that are commands to the operator's terminal."""
    forged = "vm\x1b]0;PWNED\x07\x1b[2J\r\nFAKE LINE \x9b31m"
    with target.silent(target.stolen), _thief(target) as thief:
        thief.send_report(
            inventory=HostInventory("QEMU", 7002022, forged, 2, 2048, 20, facts={"a": forged})
        )
        answer = target.call("GET", "/os-hypervisors", cloud=ADMIN).json()["hypervisors"]
        names = [one["hypervisor_hostname"] for one in answer]
        was_taken = any("FAKE LINE" in name for name in names)
        raw = [name for name in names if not name.isprintable()]
        yield Outcome(
            "bus: escape sequences in the name of a host",
            f"stored as {raw}" if raw else "",
            "" if was_taken else "the report was not taken in",
        )


def hypervisors(target: Target) -> Iterator[Outcome]:
    """With one host's key: the name of another host's hypervisor."""
    attack = "bus: take the name of another host's hypervisor"
    if len(target.hosts) < 2:
        yield Outcome(attack, untried=ONE_HOST)
        return

    def names() -> dict[str, str]:
        answer = target.call("GET", "/os-hypervisors/detail", cloud=ADMIN).json()["hypervisors"]
        return {one["service"]["host"]: one["hypervisor_hostname"] for one in answer}

    wanted = names()[target.hosts[1].name]
    with target.silent(target.stolen), _thief(target) as thief:
        thief.send_report(inventory=HostInventory("QEMU", 7002022, wanted, 2, 2048, 20))
        holders = sorted(host for host, name in names().items() if name == wanted)
    yield Outcome(attack, "" if holders == [target.hosts[1].name] else f"{holders} have it")


def _thief(target: Target) -> Any:
    stolen = target.stolen
    return closing(Thief(stolen.conf, stolen.keys))


def _replays(thief: Thief) -> Iterator[Outcome]:
    """What registered once does not register again; a session that is made up is none."""
    first = thief.last
    for what, said in {
        "registration, repeated": {"session": 0, "cookie": thief.spent},
        "registration with a cookie that nobody gave": {
            "session": 0,
            "cookie": secrets.token_hex(32),
        },
        "a session that is guessed from the last": {
            "session": first.session + 1,
            "cookie": first.cookie,
        },
    }.items():
        answer = thief.send_report(
            inventory=HostInventory("QEMU", 7002022, thief.host, 2, 2048, 20), **said
        )
        yield Outcome(f"bus: {what}", "it was taken" * bool(answer.session))


def _refused(attack: str, try_it: Callable[[], object]) -> Outcome:
    try:
        try_it()
    except errors.NoAnswer:
        return Outcome(attack)
    return Outcome(attack, "it was answered")


def _unchanged(target: Target, attack: str, server: str, before: dict[str, Any]) -> Outcome:
    """After what would take effect at once, and some seconds more."""
    try:
        await_true(lambda: target.account(server) != before, 5, pause=0.5)
    except AssertionError:
        return Outcome(attack)
    return Outcome(attack, f"{before} became {target.account(server)}")


def commands(target: Target) -> Iterator[Outcome]:
    """With the API's name at the broker, which may write into every queue, and its key for
    questions: a command that ends another host's guest."""
    other = target.hosts[-1]
    file = next(iter(sorted(target.control.parent.glob("kilonova-api.conf"))), target.control)
    conf = load(str(file))
    with target.server(other.name) as guest, opener(conf, conf.transport_url)() as connection:
        before, channel = target.account(guest), connection.channel()
        for what, key in _keys(target, other.keys.generation, conf.host_keys.query_secret).items():
            for verb in ("ensure_absent", "stop"):
                forged = CommandKey(CommandKind.DO, secrets.token_hex(16), "destroy", 1)
                command = Command(forged, guest, HIGH, 0, verb, {"keep_files": False})
                said = {"commands": to_wire([command]), "access": None}
                body = pack(key, "do", said)[1]
                for _ in range(2):
                    channel.basic_publish(
                        channel.prepare_message(body, content_encoding="binary"),
                        exchange="",
                        routing_key=host_queue(PREFIX, other.name),
                    )
            yield _unchanged(target, f"bus: forged command, sealed with {what}", guest, before)


def _keys(target: Target, generation: int, query_secret: str) -> dict[str, HostKey]:
    name = target.hosts[-1].name
    made = {
        "a key that is made up": HostKey(
            name, generation, Purpose.COMMAND, secrets.token_bytes(32)
        ),
        "the API's key for questions": derive(query_secret, name, generation, Purpose.QUERY),
        "the same, called one for commands": replace(
            derive(query_secret, name, generation, Purpose.QUERY), purpose=Purpose.COMMAND
        ),
    }
    if len(target.hosts) > 1:
        own = target.stolen.keys.newest(target.stolen.name, Purpose.COMMAND)
        made["another host's key"] = own
        made["another host's key, in this one's name"] = replace(
            own, host=name, generation=generation
        )
    return made
