# SPDX-License-Identifier: Apache-2.0
"""Join tokens: single use, expiry and replacement on the three databases, and over a real RabbitMQ.

A token lets one machine become one host within an hour.
"""

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
from tests.contract.test_rpc import CallRecorder
from tests.unit.common.test_authority import signing_request

INVENTORY = HostInventory("QEMU", 7002000, "h1", 4, 8192, 9)


def invite(store: Store, host: str = "h1", address: str = "192.0.2.7") -> int:
    return store.write(lambda tx: host_joins.invite(tx, host, address))


def use_token(store: Store, generation: int, by: str, host: str = "h1") -> bool:
    return store.write(lambda tx: host_joins.use(tx, host, generation, by))


def token_state(store: Store, generation: int) -> JoinState:
    return store.read(lambda tx: host_joins.look(tx, "h1", generation)).state


def expire(store: Store) -> None:
    """Let the hour of all tokens pass."""
    store.write(lambda tx: tx.execute(sa.update(schema.host_joins).values(until=1)))


# --- the databases ---
def test_join_token_is_used_once_by_first_key(store: Store) -> None:
    number = invite(store)
    token = store.read(lambda tx: host_joins.look(tx, "h1", number))
    assert (token.state, token.address, token.is_heard) == (JoinState.OPEN, "192.0.2.7", False)
    assert 3590 < (token.until - token.at) / 1e6 <= 3600
    with ThreadPoolExecutor(8) as pool:
        won = list(
            pool.map(lambda key_number: use_token(store, number, f"k{key_number}"), range(8))
        )
    assert sum(won) == 1 and token_state(store, number) == JoinState.USED
    winner = f"k{won.index(True)}"
    at = store.read(lambda tx: host_joins.look(tx, "h1", number))
    assert use_token(store, number, winner), "its answer was lost, and it asks again"
    again = store.read(lambda tx: host_joins.look(tx, "h1", number))
    assert (again.used_by, again.used_at) == (winner, at.used_at)


def test_join_token_is_refused_after_expiry(store: Store) -> None:
    number = invite(store)
    expire(store)
    assert token_state(store, number) == JoinState.OVER
    assert not use_token(store, number, "k")


def test_new_join_token_replaces_older_token(store: Store) -> None:
    older, newer = invite(store), invite(store)
    assert newer == older + 1
    assert not use_token(store, older, "k") and use_token(store, newer, "k")
    with pytest.raises(errors.NotFound, match="kilonova host add h1"):
        token_state(store, older)
    third = invite(store)  # also when the older token was used, but the machine was cut off
    assert token_state(store, third) == JoinState.OPEN and not use_token(store, newer, "k")


def test_join_token_is_refused_after_host_keys_are_rotated_or_removed(store: Store) -> None:
    number = invite(store)
    store.write(lambda tx: host_keys.rotate(tx, "h1", 3600))
    assert not use_token(store, number, "k"), "the keys that it brings are the old ones"
    number = invite(store)
    store.write(lambda tx: host_keys.remove(tx, "h1"))
    assert not use_token(store, number, "k")
    store.write(lambda tx: host_keys.add(tx, "h1"))
    assert not use_token(store, number, "k"), (
        "nor does it bring those of the next host of that name"
    )


def test_join_token_use_leaves_token_of_other_host_open(store: Store) -> None:
    first, second = invite(store), invite(store, "h2")
    assert use_token(store, second, "k", "h2") and token_state(store, first) == JoinState.OPEN


def test_host_invite_of_joined_host_raises_conflict(store: Store) -> None:
    number = invite(store)
    store.write(lambda tx: hosts.register(tx, "h1", "boot", INVENTORY))
    assert store.read(lambda tx: host_joins.look(tx, "h1", number)).is_heard
    with pytest.raises(errors.Conflict, match="kilonova host rotate h1.*kilonova host remove h1"):
        invite(store)
    assert store.read(host_keys.generations)["h1"].newest == number


def test_registered_host_without_key_can_be_invited_and_keeps_session(store: Store) -> None:
    """For example, a host of a release without keys. The guests stay."""
    store.write(lambda tx: hosts.register(tx, "h1", "boot", INVENTORY))
    number = invite(store)
    assert use_token(store, number, "k")
    assert store.read(lambda tx: hosts.sessions(tx, ["h1"])).keys() == {"h1"}


# --- the broker ---
@pytest.fixture
def world(rabbitmq_url: str) -> Iterator[World]:
    world = World(rabbitmq_url)
    yield world
    world.close()


class Rig:
    """A conductor that admits joining hosts, and the tokens for them."""

    def __init__(self, world: World, store: Store, signer: Signer | None = None) -> None:
        self.world, self.store = world, store
        self.keys = AllKeys(SECRETS, lambda: store.read(host_keys.generations), Clock(), good_for=0)
        world.keys = lambda secrets=SECRETS: self.keys  # type: ignore[method-assign]
        link = world.control()
        conductor.listen(link, CallRecorder(), HostJoins(store, self.keys, signer))
        assert link.wait_until_ready(5)
        self.refusals = link.refusals

    def token(self, host: str = "h1", generation: int = 0) -> JoinToken:
        number = generation or invite(self.store, host)
        key = derive(SECRETS[Purpose.COMMAND], host, number, Purpose.JOIN)
        return JoinToken(host, number, key.secret.hex(), "")

    def link(self, token: JoinToken) -> HostSide:
        return self.world.host(token.host, keys=token.keys, purpose=Purpose.JOIN)

    def client(self, token: JoinToken) -> HostJoinsClient:
        return HostJoinsClient(self.link(token))


@pytest.fixture
def sqlite_store(upgraded_database: Callable[[str], str]) -> Iterator[Store]:
    """SQLite only, because the tests above cover the three databases."""
    store = Store(upgraded_database("sqlite"))
    yield store
    store.close()


@pytest.fixture
def rig(world: World, sqlite_store: Store) -> Rig:
    return Rig(world, sqlite_store)


def test_join_returns_same_identity_to_first_machine_and_refuses_second(rig: Rig) -> None:
    token = rig.token()
    link = rig.link(token)
    client = HostJoinsClient(link)
    looked = client.look()
    assert (looked.refusal, looked.signs, looked.is_heard) == ("", False, False)
    identity = client.join()
    assert (identity.keys, identity.generation) == (
        rig.keys.for_host("h1").secrets,
        token.generation,
    )
    assert identity.password == rig.keys.broker_password("h1", token.generation)
    assert identity.certificate == ""
    assert "was used at" in client.look().refusal
    assert client.join() == identity, "its answer was lost, and it asks again"
    # Two links with one token read the same queue. Each would take answers meant for the other.
    link.close()
    thief = rig.client(token)
    with pytest.raises(errors.Conflict, match="was used at .*kilonova host remove h1"):
        thief.join()


def test_join_with_expired_token_raises_conflict_and_names_command(rig: Rig) -> None:
    client = rig.client(rig.token())
    expire(rig.store)
    with pytest.raises(errors.Conflict, match="expired at .*kilonova host add h1"):
        client.join()


def test_join_key_is_refused_for_other_messages_and_other_keys_for_join(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for a host's own key, the key of another host, and a guessed key."""
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
    # Five requests, and for each wrong key also the request for the queue.
    assert rig.refusals.counted["h1"] == 7
    assert client.look().refusal == ""


def test_join_look_with_replaced_token_is_not_answered(rig: Rig) -> None:
    older = rig.token()
    rig.token()
    with pytest.raises(errors.NoAnswer):
        rig.link(older).ask("reports", "join_look", {}, 0.5)


def test_join_with_csr_returns_certificate_and_invalid_csr_leaves_token_unused(
    world: World, sqlite_store: Store, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "tls")
    rig = Rig(world, sqlite_store, Signer.read(str(authority.path), str(authority.key_path)))
    client = rig.client(rig.token())
    assert client.look().signs
    with pytest.raises(errors.BadRequest, match="request"):
        client.join("no request")
    assert client.look().refusal == "", "what is refused uses nothing"
    assert client.join(signing_request()).certificate.startswith("-----BEGIN CERTIFICATE-----")
