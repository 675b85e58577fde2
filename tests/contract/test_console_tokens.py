# SPDX-License-Identifier: Apache-2.0
"""Console tokens on the three databases: single use, cookies, expiry, and deletion of old rows."""

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
    store = Store(upgraded_url)
    store.write(
        lambda tx: guests.add(
            tx,
            [
                {"server_id": SERVER, "host": "h1", "fence": 3},
                {"server_id": OTHER, "host": "h1", "fence": 3},
            ],
        )
    )
    yield store
    store.close()


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


def test_console_token_is_single_use_and_stored_only_as_hash(store: Store) -> None:
    token = create(store)
    [row] = rows(store)
    assert (
        len(token) == 43
        and token not in str(row)
        and row.expires_at - row.created_at >= 60 * SECOND
    )
    row_by_token = store.read(lambda tx: console_tokens.find(tx, token))
    assert row_by_token is not None and row_by_token.hash == row.hash
    record = use(store, token)
    assert (record.server_id, record.host, record.fence, record.kind) == (SERVER, "h1", 3, "novnc")
    assert use(store, token) is None
    assert store.read(lambda tx: console_tokens.find(tx, token)) is None


def test_console_token_concurrent_use_succeeds_once(store: Store) -> None:
    token, results, start = create(store), [], threading.Barrier(8)

    def use_at_once() -> None:
        start.wait()
        results.append(use(store, token))

    threads = [threading.Thread(target=use_at_once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([result for result in results if result]) == 1 and len(results) == 8


@pytest.mark.parametrize("token", ["", "x", "x" * 43, "\udcff", "a" * 8000])
def test_unknown_console_token_is_refused(store: Store, token: str) -> None:
    assert use(store, token) is None


def test_expired_console_token_is_refused(store: Store) -> None:
    token = create(store, seconds=0)
    assert use(store, token) is None


def move(tx: Any) -> None:
    guests.add_removal(tx, SERVER, 4)
    guests.add(tx, [{"server_id": SERVER, "host": "h2", "fence": 4}])


def move_and_return(tx: Any) -> None:
    guests.add_removal(tx, SERVER, 4)
    guests.confirm_removals(tx, [(SERVER, "h1", 4)])
    guests.add(tx, [{"server_id": SERVER, "host": "h1", "fence": 5}])


@pytest.mark.parametrize(
    "change",
    [lambda tx: guests.add_removal(tx, SERVER, 4), move, move_and_return],
    ids=["deleted", "moved", "came back"],
)
def test_console_token_and_session_end_when_guest_is_deleted_or_moved(
    store: Store, change: Any
) -> None:
    token, opened, other = create(store), create(store), create(store, OTHER)
    hashes = [use(store, unused_token).hash for unused_token in (opened, other)]
    assert store.read(lambda tx: console_tokens.alive(tx, hashes)).keys() == set(hashes)
    store.write(change)
    assert use(store, token) is None
    assert store.read(lambda tx: console_tokens.alive(tx, hashes)).keys() == {hashes[1]}


def test_forget_console_token_ends_session(store: Store) -> None:
    record = use(store, create(store))
    store.write(lambda tx: console_tokens.forget(tx, record.hash, record.used_at))
    assert store.read(lambda tx: console_tokens.alive(tx, [record.hash])) == {}


def test_console_token_is_reusable_only_with_first_cookie(store: Store) -> None:
    token = create(store)
    first = store.write(lambda tx: console_tokens.use(tx, token, "a"))

    def take_over(cookie: str) -> Any:
        return store.write(lambda tx: console_tokens.take_over(tx, token, cookie))

    assert [take_over(cookie) for cookie in ("", "b")] == [None, None]
    second = take_over("a")
    assert second.used_at > first.used_at
    store.write(lambda tx: console_tokens.forget(tx, first.hash, first.used_at))
    assert store.read(lambda tx: console_tokens.alive(tx, [first.hash])) == {
        first.hash: second.used_at
    }, "the end of the first session ends no other"
    store.write(lambda tx: console_tokens.forget(tx, first.hash, second.used_at))
    assert take_over("a") is None
    for cookie in ("", "b"):
        assert store.write(lambda tx, c=cookie: console_tokens.use(tx, token, c)) is None
    assert store.write(lambda tx: console_tokens.use(tx, token, "a")) is not None
    store.write(lambda tx: guests.add_removal(tx, SERVER, 4))
    assert take_over("a") is None


def test_console_sessions_are_listed_and_revoked(store: Store) -> None:
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


def test_create_console_token_deletes_expired_and_surplus_rows(store: Store) -> None:
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


def test_create_console_token_without_guest_raises_conflict(store: Store) -> None:
    store.write(lambda tx: guests.add_removal(tx, SERVER, 4))
    with pytest.raises(errors.Conflict, match="not ready"):
        create(store)


def test_console_token_is_bound_to_first_cookie(store: Store) -> None:
    token = create(store)
    results = [
        store.write(lambda tx, cookie=cookie: console_tokens.bind(tx, token, cookie))
        for cookie in ("a", "b", "a")
    ]
    assert results == [True, False, False]
    assert store.read(lambda tx: console_tokens.find(tx, token)) is None
    for cookie in ("", "b"):
        assert store.write(lambda tx, cookie=cookie: console_tokens.use(tx, token, cookie)) is None
    assert store.write(
        lambda tx: console_tokens.use(tx, token, "a")
    ).browser == console_tokens.hash_token("a")
    assert not store.write(lambda tx: console_tokens.bind(tx, token, "c"))


@pytest.mark.parametrize("kind", ["spice-html5", "novnc", "serial"])
@pytest.mark.parametrize("bound", [False, True])
def test_console_session_is_found_only_by_first_cookie(
    store: Store, kind: str, bound: bool
) -> None:
    def find_session(cookie: str) -> Any:
        return store.read(lambda tx: console_tokens.of_open_session(tx, token, cookie))

    token = create(store, kind=kind)
    if bound:
        assert store.write(lambda tx: console_tokens.bind(tx, token, "a"))
    assert find_session("a") is None  # The session is not open yet.
    opened = store.write(lambda tx: console_tokens.use(tx, token, "a"))
    assert opened.browser == console_tokens.hash_token("a")
    assert [find_session(cookie) for cookie in ("", "b", token)] == [None] * 3
    assert find_session("a").hash == opened.hash
    store.write(lambda tx: guests.add_removal(tx, SERVER, 4))
    assert find_session("a") is None


def test_console_session_without_cookie_cannot_be_joined(store: Store) -> None:
    token = create(store, kind="spice-html5")
    assert use(store, token).browser is None
    for cookie in ("", "a"):
        row = store.read(
            lambda tx, cookie=cookie: console_tokens.of_open_session(tx, token, cookie)
        )
        assert row is None
