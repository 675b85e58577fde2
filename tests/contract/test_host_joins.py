# SPDX-License-Identifier: Apache-2.0
"""A token lets one machine become one host, once, within its hour: what the three databases decide,
and what a real RabbitMQ carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.clock import Clock
from common.domain.models import HostInventory
from common.rpc import conductor
from common.rpc.host_credentials import HostJoinsClient
from common.rpc.host_link import HostSide
from common.security.certificates import Signer
from common.security.host_joins import Envelope, JoinToken
from common.security.host_keys import AllKeys, Purpose, derive
from common.store import schema
from common.store.engine import Store
from common.store.hosts import host_joins, host_keys, hosts
from common.store.hosts.host_joins import JoinState
from conductor.hosts.host_credentials import HostJoins
from deploy.one_machine.cloud.authority import Authority
from tests.contract.test_host_link import SECRETS, World
from tests.contract.test_rpc import Told
from tests.unit.common.test_authority import signing_request

INVENTORY = HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)


def invited(store: Store, host: str = "h1", address: str = "192.0.2.7") -> int:
    return store.write(lambda tx: host_joins.invite(tx, host, address))


def used(store: Store, generation: int, by: str, host: str = "h1") -> bool:
    return store.write(lambda tx: host_joins.use(tx, host, generation, by))


def state(store: Store, generation: int) -> JoinState:
    return store.read(lambda tx: host_joins.look(tx, "h1", generation)).state


def expire(store: Store) -> None:
    """An hour passes."""
    store.write(lambda tx: tx.execute(sa.update(schema.host_joins).values(until=1)))


# --- the databases ---
def test_it_is_used_once_by_whoever_comes_first(store: Store) -> None:
    number = invited(store)
    found = store.read(lambda tx: host_joins.look(tx, "h1", number))
    assert (found.state, found.address, found.is_heard) == (JoinState.OPEN, "192.0.2.7", False)
    assert 3590 < (found.until - found.at) / 1e6 <= 3600
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda who: used(store, number, f"k{who}"), range(8)))
    assert sum(won) == 1 and state(store, number) == JoinState.USED
    winner = f"k{won.index(True)}"
    at = store.read(lambda tx: host_joins.look(tx, "h1", number))
    assert used(store, number, winner), "its answer was lost, and it asks again"
    again = store.read(lambda tx: host_joins.look(tx, "h1", number))
    assert (again.used_by, again.used_at) == (winner, at.used_at)


def test_after_its_hour_it_is_nobodys(store: Store) -> None:
    number = invited(store)
    expire(store)
    assert state(store, number) == JoinState.OVER
    assert not used(store, number, "k")


def test_a_newer_one_takes_its_place(store: Store) -> None:
    older, newer = invited(store), invited(store)
    assert newer == older + 1
    assert not used(store, older, "k") and used(store, newer, "k")
    with pytest.raises(errors.NotFound, match="kilonova host add h1"):
        state(store, older)
    third = invited(store)  # also of one that was used by somebody who was cut off
    assert state(store, third) == JoinState.OPEN and not used(store, newer, "k")


def test_keys_that_are_replaced_or_removed_end_it(store: Store) -> None:
    number = invited(store)
    store.write(lambda tx: host_keys.rotate(tx, "h1", 3600))
    assert not used(store, number, "k"), "the keys that it brings are the old ones"
    number = invited(store)
    store.write(lambda tx: host_keys.remove(tx, "h1"))
    assert not used(store, number, "k")
    store.write(lambda tx: host_keys.add(tx, "h1"))
    assert not used(store, number, "k"), "nor does it bring those of the next host of that name"


def test_another_host_has_another(store: Store) -> None:
    one, two = invited(store), invited(store, "h2")
    assert used(store, two, "k", "h2") and state(store, one) == JoinState.OPEN


def test_who_has_joined_is_not_invited_again(store: Store) -> None:
    number = invited(store)
    store.write(lambda tx: hosts.register(tx, "h1", "boot", INVENTORY))
    assert store.read(lambda tx: host_joins.look(tx, "h1", number)).is_heard
    with pytest.raises(errors.Conflict, match="kilonova host rotate h1.*kilonova host remove h1"):
        invited(store)
    assert store.read(host_keys.generations)["h1"].newest == number


def test_a_host_that_lost_its_key_is_invited(store: Store) -> None:
    """As one of a release that had none: what is on it stays."""
    store.write(lambda tx: hosts.register(tx, "h1", "boot", INVENTORY))
    number = invited(store)
    assert used(store, number, "k")
    assert store.read(lambda tx: hosts.sessions(tx, ["h1"])).keys() == {"h1"}


# --- the broker ---
@pytest.fixture
def world(rabbitmq_url: str) -> Iterator[World]:
    made = World(rabbitmq_url)
    yield made
    made.close()


class Rig:
    """A conductor that takes in those who join, and who has tokens."""

    def __init__(self, world: World, store: Store, signer: Signer | None = None) -> None:
        self.world, self.store = world, store
        self.keys = AllKeys(SECRETS, lambda: store.read(host_keys.generations), Clock(), good_for=0)
        world.keys = lambda secrets=SECRETS: self.keys  # type: ignore[method-assign]
        link = world.control()
        conductor.listen(link, Told(), HostJoins(store, self.keys, signer))
        assert link.wait_until_ready(5)
        self.refusals = link.refusals

    def token(self, host: str = "h1", generation: int = 0) -> JoinToken:
        number = generation or invited(self.store, host)
        key = derive(SECRETS[Purpose.COMMAND], host, number, Purpose.JOIN)
        return JoinToken(host, number, key.secret.hex(), "")

    def link(self, token: JoinToken) -> HostSide:
        return self.world.host(token.host, keys=token.keys, purpose=Purpose.JOIN)

    def client(self, token: JoinToken) -> HostJoinsClient:
        return HostJoinsClient(self.link(token))


@pytest.fixture
def one_store(upgraded_database: Callable[[str], str]) -> Iterator[Store]:
    """What the databases decide stands above; here one is enough."""
    made = Store(upgraded_database("sqlite"))
    yield made
    made.close()


@pytest.fixture
def rig(world: World, one_store: Store) -> Rig:
    return Rig(world, one_store)


def test_who_has_the_token_gets_the_identity_once(rig: Rig) -> None:
    token = rig.token()
    link = rig.link(token)
    client = HostJoinsClient(link)
    looked = client.look()
    assert (looked.refusal, looked.signs, looked.is_heard) == ("", False, False)
    got = client.join()
    assert (got.keys, got.generation) == (rig.keys.for_host("h1").secrets, token.generation)
    assert got.password == rig.keys.broker_password("h1", token.generation)
    assert got.certificate == ""
    assert "was used at" in client.look().refusal
    assert client.join() == got, "its answer was lost, and it asks again"
    # Two links with one token read the same queue, and each would take answers of the other.
    link.close()
    thief = rig.client(token)
    with pytest.raises(errors.Conflict, match="was used at .*kilonova host remove h1"):
        thief.join()


def test_one_that_is_over_says_so(rig: Rig) -> None:
    client = rig.client(rig.token())
    expire(rig.store)
    with pytest.raises(errors.Conflict, match="is over since .*kilonova host add h1"):
        client.join()


def test_its_key_opens_nothing_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a host's own key join, or another host's, or a guessed one."""
    monkeypatch.setattr("common.rpc.host_credentials.ANSWER_SECONDS", 0.5)
    token = rig.token()
    link = rig.link(token)
    client = HostJoinsClient(link)
    with pytest.raises(errors.NoAnswer):
        link.ask("reports", "sync", {"request": {"host": "h1"}}, 0.5)
    with pytest.raises(errors.NoAnswer):
        link.ask("heartbeats", "join_look", {}, 0.5)
    agent = rig.world.host("h1", keys=rig.keys.for_host("h1"))
    with pytest.raises(errors.NoAnswer):
        agent.ask("reports", "join", {"public": Envelope().public, "request": ""}, 0.5)
    guessed = JoinToken("h1", token.generation, "00" * 32, "")
    other = JoinToken("h1", token.generation, rig.token("h2").secret, "")
    agent.close()
    for wrong in (guessed, other):
        wrong_link = rig.link(wrong)
        with pytest.raises(errors.NoAnswer):
            HostJoinsClient(wrong_link).join()
        wrong_link.close()
    # Five questions, and of each wrong key also the request for the queue.
    assert rig.refusals.counted["h1"] == 7
    assert client.look().refusal == ""


def test_a_token_that_was_replaced_is_refused(rig: Rig) -> None:
    older = rig.token()
    rig.token()
    with pytest.raises(errors.NoAnswer):
        rig.link(older).ask("reports", "join_look", {}, 0.5)


def test_a_certificate_comes_with_the_identity(
    world: World, one_store: Store, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "tls")
    rig = Rig(world, one_store, Signer.read(str(authority.path), str(authority.key_path)))
    client = rig.client(rig.token())
    assert client.look().signs
    with pytest.raises(errors.BadRequest, match="request"):
        client.join("no request")
    assert client.look().refusal == "", "what is refused uses nothing"
    assert client.join(signing_request()).certificate.startswith("-----BEGIN CERTIFICATE-----")
