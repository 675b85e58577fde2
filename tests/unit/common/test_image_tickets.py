# SPDX-License-Identifier: Apache-2.0
"""Tickets for images: what they open, for how long, and that each verb gets what it needs and
nothing more."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg

from common.domain import errors
from common.domain.models import GuestSpec, ImageRef
from common.domain.verbs import VERBS, EnsureGuest
from common.security.image_tickets import (
    LIFETIME,
    LONGEST,
    MOST,
    Gateway,
    Tickets,
    configured,
    images_read,
    images_written,
)
from common.security.vault import Vault
from common.service import config
from compute_agent.verbs import Tools, carry_out
from compute_agent.virt.memory.state.script import QUIET
from tests.verbs import VALUES, new_command, new_verb


class Clock:
    now = 1_000_000.0

    def seconds(self) -> float:
        return self.now


#: What a driver returns, by method.
RETURNS = {
    "offer": {"bytes": 1},
    "receive": {"bytes": 1},
    "prepare_incoming": {},
    "live_migrate": {"bytes": 1, "job_seconds": 1.0},
    "snapshot": 1,
}


class Driver:
    """Writes down the one call that a verb makes."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.given.extend(given) or RETURNS.get(name)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], cfg.ConfigOpts]]:
    def read(lines: str) -> cfg.ConfigOpts:
        (tmp_path / "kilonova.conf").write_text(lines)
        return config.load(str(tmp_path / "kilonova.conf"))

    yield read
    config.CONF.clear()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tickets(clock: Clock) -> Tickets:
    return Tickets(Vault("key"), clock.seconds)


def test_a_ticket_opens_what_it_says(tickets: Tickets) -> None:
    found = tickets.check(tickets.make("h1", ["a", "b"], ["c"]))
    assert (found.host, found.reads, found.writes) == ("h1", {"a", "b"}, {"c"})


def test_a_ticket_ends(tickets: Tickets, clock: Clock) -> None:
    ticket = tickets.make("h1", ["a"])
    clock.now += LIFETIME - 1
    tickets.check(ticket)
    clock.now += 1
    with pytest.raises(errors.Unauthorized):
        tickets.check(ticket)


def test_what_others_made_opens_nothing(tickets: Tickets, clock: Clock) -> None:
    ticket = tickets.make("h1", ["a"])
    body, _, signature = ticket.partition(".")
    says = json.loads(base64.urlsafe_b64decode(body))
    longer = base64.urlsafe_b64encode(json.dumps([says[0], ["b"], *says[2:]]).encode()).decode()
    forged = Tickets(Vault("another"), clock.seconds).make("h1", ["a"])
    for text in (
        "",
        ".",
        body,
        f"{body}.",
        f".{signature}",
        f"{longer}.{signature}",
        forged,
        f"{body}.{'0' * 64}",
        ticket + "0",
        f"{ticket}.{signature}",
        "é.ÿ",
        "x" * 100_000,
        ticket[1:],
    ):
        with pytest.raises(errors.Unauthorized):
            tickets.check(text)


def test_tickets_of_each_key_of_a_rotation_are_known(clock: Clock) -> None:
    old, new = Tickets(Vault("old"), clock.seconds), Tickets(Vault("new, old"), clock.seconds)
    assert new.check(old.make("h1", ["a"])).host == "h1"
    with pytest.raises(errors.Unauthorized):
        old.check(new.make("h1", ["a"]))


def test_a_cloud_without_a_secret_has_no_tickets(clock: Clock) -> None:
    for use in (lambda tickets: tickets.make("h1", ["a"]), lambda tickets: tickets.check("a.b")):
        with pytest.raises(errors.Unavailable, match="secret_key"):
            use(Tickets(Vault(""), clock.seconds))


def test_the_key_is_for_tickets_alone() -> None:
    assert Tickets(Vault("key")).make("h", ["a"]).partition(".")[2] not in (
        Vault("key").derive(""),
        Vault("key").derive("image-gateway"),
    )


def test_a_full_ticket_fits_a_header(tickets: Tickets) -> None:
    ticket = tickets.make("h" * 255, [f"{number:036}" for number in range(MOST)])
    assert len(ticket) <= LONGEST
    assert len(tickets.check(ticket).reads) == MOST
    with pytest.raises(ValueError, match=str(MOST)):
        tickets.make("h", ["a"] * MOST, ["b"])


def test_a_message_opens_the_images_of_its_commands(tickets: Tickets) -> None:
    gateway = Gateway("http://gateway", tickets)
    names = ("ensure_guest", "snapshot", "rescue", "ensure_guest")
    access = gateway.for_commands("h1", [new_command(name) for name in names])
    assert access is not None
    found = tickets.check(access.token)
    assert (access.url, found.host, found.reads, found.writes) == (
        "http://gateway",
        "h1",
        {"of the guest", "of the command"},
        {"made"},
    )


def test_commands_without_images_need_no_ticket(tickets: Tickets) -> None:
    guest = replace(VALUES["guest"], image=None)
    nothing = [EnsureGuest(guest=guest), *map(new_verb, ("ensure_stopped", "install"))]
    commands = [new_command(verb) for verb in nothing]
    assert Gateway("http://gateway", tickets).for_commands("h1", commands) is None


@pytest.mark.parametrize("name", sorted(VERBS.keys() - {"control_migration"}))
def test_each_verb_has_what_it_hands_to_the_driver(name: str) -> None:
    """A verb that gives the driver the reader names the image, and the others do not; so with the
    writer."""
    driver, written, verb = Driver(), list[str](), new_verb(name)

    def reader(image: str) -> Any:
        raise AssertionError("this driver reads nothing")

    tools = Tools(driver, reader, written.append, QUIET, lambda *where: None)  # type: ignore[arg-type]  # it records
    carry_out(tools, new_command(verb), verb)
    assert (reader in driver.given) == bool(verb.image_to_read)
    assert written == images_written([verb])
    assert bool(written) == bool(verb.image_to_write)
    given = [
        one.id if isinstance(one, ImageRef) else one.image.id
        for one in driver.given
        if isinstance(one, (GuestSpec, ImageRef))
    ]
    assert images_read([verb]) == (given[-1:] if verb.image_to_read else [])
    assert verb.copies_disks or not (verb.image_to_read or verb.image_to_write)


def test_who_has_the_clouds_secret_alone_makes_no_tickets(
    load: Callable[[str], cfg.ConfigOpts],
) -> None:
    """As an API process has it; conductors and gateways have another one."""
    conf = load(
        "[DEFAULT]\nsecret_key = everybody's\n[image_gateway]\nticket_secret = conductors', older\n"
    )
    with pytest.raises(errors.Unauthorized):
        configured(conf).check(Tickets(Vault("everybody's")).make("h1", ["a"]))
    for secret in ("conductors'", "older"):
        assert configured(conf).check(Tickets(Vault(secret)).make("h1", ["a"])).host == "h1"


def test_a_cloud_without_that_secret_goes_on_and_says_so(
    load: Callable[[str], cfg.ConfigOpts], caplog: pytest.LogCaptureFixture
) -> None:
    conf = load("[DEFAULT]\nsecret_key = everybody's\n")
    assert configured(conf).check(Tickets(Vault("everybody's")).make("h1", ["a"])).host == "h1"
    assert "set [image_gateway] ticket_secret" in caplog.text
