# SPDX-License-Identifier: Apache-2.0
"""Console tokens on every database: used once, by one, while the guest is there; old ones go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors
from common.domain.clock import SECOND
from common.store import schema
from common.store.engine import Store, now
from common.store.servers import console_tokens, guests

SERVER, OTHER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b12"


@pytest.fixture
def store(upgraded_url: str) -> Iterator[Store]:
    made = Store(upgraded_url)
    made.write(
        lambda tx: guests.add(
            tx,
            [
                {"server_id": SERVER, "host": "h1", "fence": 3},
                {"server_id": OTHER, "host": "h1", "fence": 3},
            ],
        )
    )
    yield made
    made.close()


def create(store: Store, server: str = SERVER, seconds: int = 60, kind: str = "novnc") -> str:
    return store.write(
        lambda tx: console_tokens.create(
            tx, server, kind, project_id="p", user_id="u", seconds=seconds
        )
    )


def use(store: Store, token: str) -> Any:
    return store.write(lambda tx: console_tokens.use(tx, token))


def rows(store: Store) -> list[Any]:
    return store.read(lambda tx: list(tx.execute(sa.select(schema.console_tokens))))


def test_a_token_is_used_once_and_stands_nowhere(store: Store) -> None:
    token = create(store)
    [row] = rows(store)
    assert (
        len(token) == 43
        and token not in str(row)
        and row.expires_at - row.created_at >= 60 * SECOND
    )
    found = store.read(lambda tx: console_tokens.find(tx, token))
    assert found is not None and found.hash == row.hash
    record = use(store, token)
    assert (record.server_id, record.host, record.fence, record.kind) == (SERVER, "h1", 3, "novnc")
    assert use(store, token) is None
    assert store.read(lambda tx: console_tokens.find(tx, token)) is None


def test_of_many_who_come_at_once_one_is_let_in(store: Store) -> None:
    token, results, start = create(store), [], threading.Barrier(8)

    def come() -> None:
        start.wait()
        results.append(use(store, token))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([result for result in results if result]) == 1 and len(results) == 8


@pytest.mark.parametrize("token", ["", "x", "x" * 43, "\udcff", "a" * 8000])
def test_an_unknown_token_opens_nothing(store: Store, token: str) -> None:
    assert use(store, token) is None


def test_an_expired_token_opens_nothing(store: Store) -> None:
    token = create(store, seconds=0)
    assert use(store, token) is None


def move(tx: Any) -> None:
    guests.add_debt(tx, SERVER, 4)
    guests.add(tx, [{"server_id": SERVER, "host": "h2", "fence": 4}])


def come_back(tx: Any) -> None:
    guests.add_debt(tx, SERVER, 4)
    guests.confirm_debts(tx, [(SERVER, "h1", 4)])
    guests.add(tx, [{"server_id": SERVER, "host": "h1", "fence": 5}])


@pytest.mark.parametrize(
    "happened",
    [lambda tx: guests.add_debt(tx, SERVER, 4), move, come_back],
    ids=["deleted", "moved", "came back"],
)
def test_another_guest_needs_another_token(store: Store, happened: Any) -> None:
    token, opened, other = create(store), create(store), create(store, OTHER)
    hashes = [use(store, taken).hash for taken in (opened, other)]
    assert store.read(lambda tx: console_tokens.alive(tx, hashes)).keys() == set(hashes)
    store.write(happened)
    assert use(store, token) is None
    assert store.read(lambda tx: console_tokens.alive(tx, hashes)).keys() == {hashes[1]}


def test_whoever_removes_the_row_ends_the_session(store: Store) -> None:
    record = use(store, create(store))
    store.write(lambda tx: console_tokens.forget(tx, record.hash, record.used_at))
    assert store.read(lambda tx: console_tokens.alive(tx, [record.hash])) == {}


def test_browser_uses_its_token_again_and_nobody_else_does(store: Store) -> None:
    token = create(store)
    first = store.write(lambda tx: console_tokens.use(tx, token, "a"))

    def taken_over(cookie: str) -> Any:
        return store.write(lambda tx: console_tokens.take_over(tx, token, cookie))

    assert [taken_over(cookie) for cookie in ("", "b")] == [None, None]
    second = taken_over("a")
    assert second.used_at > first.used_at
    store.write(lambda tx: console_tokens.forget(tx, first.hash, first.used_at))
    assert store.read(lambda tx: console_tokens.alive(tx, [first.hash])) == {
        first.hash: second.used_at
    }, "the end of the first session ends no other"
    store.write(lambda tx: console_tokens.forget(tx, first.hash, second.used_at))
    assert taken_over("a") is None
    for cookie in ("", "b"):
        assert store.write(lambda tx, c=cookie: console_tokens.use(tx, token, c)) is None
    assert store.write(lambda tx: console_tokens.use(tx, token, "a")) is not None
    store.write(lambda tx: guests.add_debt(tx, SERVER, 4))
    assert taken_over("a") is None


def test_an_operator_sees_sessions_and_ends_them(store: Store) -> None:
    session, unused, other = (
        use(store, create(store)),
        create(store),
        use(store, create(store, OTHER)),
    )
    assert [row.hash for row in store.read(console_tokens.sessions)] == [session.hash, other.hash]
    assert store.write(lambda tx: console_tokens.revoke(tx, SERVER)) == 2
    assert use(store, unused) is None
    alive = store.read(lambda tx: console_tokens.alive(tx, [session.hash, other.hash]))
    assert alive == {other.hash: other.used_at}
    assert store.write(lambda tx: console_tokens.revoke(tx, None)) == 1
    assert store.read(console_tokens.sessions) == []


def test_rows_do_not_pile_up(store: Store) -> None:
    session, other = use(store, create(store)), create(store, OTHER)
    tokens = [create(store) for _ in range(console_tokens.UNUSED_PER_SERVER + 3)]
    assert len(rows(store)) == console_tokens.UNUSED_PER_SERVER + 2
    assert use(store, tokens[0]) is None and use(store, tokens[-1]) is not None
    long_ago = sa.update(schema.console_tokens).values(expires_at=now() - 7200 * SECOND)
    store.write(lambda tx: tx.execute(long_ago))
    store.write(lambda tx: console_tokens.keep(tx, [session.hash], 60))
    create(store)
    assert session.hash in {row.hash for row in rows(store)} and len(rows(store)) == 2
    assert use(store, other) is None


def test_a_server_without_a_guest_has_no_console(store: Store) -> None:
    store.write(lambda tx: guests.add_debt(tx, SERVER, 4))
    with pytest.raises(errors.Conflict, match="not ready"):
        create(store)


def test_a_token_is_bound_to_one_cookie(store: Store) -> None:
    token = create(store)
    found = [
        store.write(lambda tx, cookie=cookie: console_tokens.bind(tx, token, cookie))
        for cookie in ("a", "b", "a")
    ]
    assert found == [True, False, False]
    assert store.read(lambda tx: console_tokens.find(tx, token)) is None
    for cookie in ("", "b"):
        assert store.write(lambda tx, cookie=cookie: console_tokens.use(tx, token, cookie)) is None
    assert store.write(
        lambda tx: console_tokens.use(tx, token, "a")
    ).browser == console_tokens.hash_token("a")
    assert not store.write(lambda tx: console_tokens.bind(tx, token, "c"))


@pytest.mark.parametrize("kind", ["spice-html5", "novnc", "serial"])
@pytest.mark.parametrize("bound", [False, True])
def test_session_is_found_by_who_brings_its_first_cookie(
    store: Store, kind: str, bound: bool
) -> None:
    def joined(cookie: str) -> Any:
        return store.read(lambda tx: console_tokens.of_open_session(tx, token, cookie))

    token = create(store, kind=kind)
    if bound:
        assert store.write(lambda tx: console_tokens.bind(tx, token, "a"))
    assert joined("a") is None  # it is not open yet
    opened = store.write(lambda tx: console_tokens.use(tx, token, "a"))
    assert opened.browser == console_tokens.hash_token("a")
    assert [joined(cookie) for cookie in ("", "b", token)] == [None] * 3
    assert joined("a").hash == opened.hash
    store.write(lambda tx: guests.add_debt(tx, SERVER, 4))
    assert joined("a") is None


def test_a_session_that_began_without_a_cookie_is_joined_by_nobody(store: Store) -> None:
    token = create(store, kind="spice-html5")
    assert use(store, token).browser is None
    for cookie in ("", "a"):
        found = store.read(
            lambda tx, cookie=cookie: console_tokens.of_open_session(tx, token, cookie)
        )
        assert found is None
