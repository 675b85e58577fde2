# SPDX-License-Identifier: Apache-2.0
"""Tickets for images: their images, lifetime and signature, and the images of each verb."""

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


#: Method of a driver -> its result.
RETURNS = {
    "offer": {"bytes": 1},
    "receive": {"bytes": 1},
    "prepare_incoming": {},
    "live_migrate": {"bytes": 1, "job_seconds": 1.0},
    "snapshot": 1,
}


class Driver:
    """Records the arguments of the one call that a verb makes."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.given.extend(arguments) or RETURNS.get(name)


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


def test_image_ticket_contains_its_host_and_images(tickets: Tickets) -> None:
    ticket = tickets.check(tickets.make("h1", ["a", "b"], ["c"]))
    assert (ticket.host, ticket.reads, ticket.writes) == ("h1", {"a", "b"}, {"c"})


def test_image_ticket_expires_after_its_lifetime(tickets: Tickets, clock: Clock) -> None:
    ticket = tickets.make("h1", ["a"])
    clock.now += LIFETIME - 1
    tickets.check(ticket)
    clock.now += 1
    with pytest.raises(errors.Unauthorized):
        tickets.check(ticket)


def test_image_ticket_check_refuses_forged_or_damaged_ticket(
    tickets: Tickets, clock: Clock
) -> None:
    ticket = tickets.make("h1", ["a"])
    body, _, signature = ticket.partition(".")
    fields = json.loads(base64.urlsafe_b64decode(body))
    longer = base64.urlsafe_b64encode(json.dumps([fields[0], ["b"], *fields[2:]]).encode()).decode()
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


def test_image_ticket_of_older_key_is_accepted_while_the_key_is_listed(clock: Clock) -> None:
    old, new = Tickets(Vault("old"), clock.seconds), Tickets(Vault("new, old"), clock.seconds)
    assert new.check(old.make("h1", ["a"])).host == "h1"
    with pytest.raises(errors.Unauthorized):
        old.check(new.make("h1", ["a"]))


def test_image_tickets_without_secret_key_raise_unavailable(clock: Clock) -> None:
    for use in (lambda tickets: tickets.make("h1", ["a"]), lambda tickets: tickets.check("a.b")):
        with pytest.raises(errors.Unavailable, match="secret_key"):
            use(Tickets(Vault(""), clock.seconds))


def test_image_ticket_key_differs_from_other_derived_keys() -> None:
    assert Tickets(Vault("key")).make("h", ["a"]).partition(".")[2] not in (
        Vault("key").derive(""),
        Vault("key").derive("image-gateway"),
    )


def test_image_ticket_with_maximum_number_of_images_fits_a_header(tickets: Tickets) -> None:
    ticket = tickets.make("h" * 255, [f"{number:036}" for number in range(MOST)])
    assert len(ticket) <= LONGEST
    assert len(tickets.check(ticket).reads) == MOST
    with pytest.raises(ValueError, match=str(MOST)):
        tickets.make("h", ["a"] * MOST, ["b"])


def test_image_gateway_ticket_for_commands_grants_exactly_their_images(tickets: Tickets) -> None:
    gateway = Gateway("http://gateway", tickets)
    names = ("ensure_guest", "snapshot", "rescue", "ensure_guest")
    access = gateway.for_commands("h1", [new_command(name) for name in names])
    assert access is not None
    ticket = tickets.check(access.token)
    assert (access.url, ticket.host, ticket.reads, ticket.writes) == (
        "http://gateway",
        "h1",
        {"of the guest", "of the command"},
        {"made"},
    )


def test_image_gateway_for_commands_without_images_returns_none(tickets: Tickets) -> None:
    guest = replace(VALUES["guest"], image=None)
    verbs = [EnsureGuest(guest=guest), *map(new_verb, ("ensure_stopped", "install"))]
    commands = [new_command(verb) for verb in verbs]
    assert Gateway("http://gateway", tickets).for_commands("h1", commands) is None


@pytest.mark.parametrize("name", sorted(VERBS.keys() - {"control_migration"}))
def test_verb_declares_images_read_or_written_by_its_driver_call(name: str) -> None:
    """A verb names an image to read or to write if it passes the reader or writer to the driver."""
    driver, written, verb = Driver(), list[str](), new_verb(name)

    def reader(image: str) -> Any:
        raise AssertionError("this driver reads nothing")

    tools = Tools(driver, reader, written.append, QUIET, lambda *details: None)  # type: ignore[arg-type]  # The driver is a stand-in.
    carry_out(tools, new_command(verb), verb)
    assert (reader in driver.given) == bool(verb.image_to_read)
    assert written == images_written([verb])
    assert bool(written) == bool(verb.image_to_write)
    image_ids = [
        argument.id if isinstance(argument, ImageRef) else argument.image.id
        for argument in driver.given
        if isinstance(argument, (GuestSpec, ImageRef))
    ]
    assert images_read([verb]) == (image_ids[-1:] if verb.image_to_read else [])
    assert verb.copies_disks or not (verb.image_to_read or verb.image_to_write)


def test_image_ticket_of_secret_key_is_refused_if_ticket_secret_is_set(
    load: Callable[[str], cfg.ConfigOpts],
) -> None:
    """The API has only the cloud's secret. Conductors and gateways have a separate secret."""
    conf = load(
        "[DEFAULT]\nsecret_key = everybody's\n[image_gateway]\nticket_secret = conductors', older\n"
    )
    with pytest.raises(errors.Unauthorized):
        configured(conf).check(Tickets(Vault("everybody's")).make("h1", ["a"]))
    for secret in ("conductors'", "older"):
        assert configured(conf).check(Tickets(Vault(secret)).make("h1", ["a"])).host == "h1"


def test_image_tickets_use_secret_key_with_a_warning_without_ticket_secret(
    load: Callable[[str], cfg.ConfigOpts], caplog: pytest.LogCaptureFixture
) -> None:
    conf = load("[DEFAULT]\nsecret_key = everybody's\n")
    assert configured(conf).check(Tickets(Vault("everybody's")).make("h1", ["a"])).host == "h1"
    assert "set [image_gateway] ticket_secret" in caplog.text
