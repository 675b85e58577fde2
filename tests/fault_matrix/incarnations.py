# SPDX-License-Identifier: Apache-2.0
"""A check of console tokens and metadata of removed guests.

A console token is valid only for the guest for which the token was created. The server's next
guest, on the same host or another, needs a new token.
"""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.store.servers import console_tokens, metadata
from compute_agent.virt.memory.state.host import MemoryHost
from tests.workflows.simulator import Cloud

#: Lifetime of a token, longer than a cell takes.
LONG_SECONDS = 10**7


class Incarnations:
    """The console tokens of one server, and which of them belong to removed guests.

    A live migration hands a guest over to another host. If the server stays on the source after
    all, the guest and its tokens are valid again.
    """

    def __init__(self, cloud: Cloud, server: Callable[[], str]) -> None:
        self._cloud, self._server = cloud, server
        # Each token with the host of its guest.
        self._tokens: list[tuple[str, str]] = []
        self._dead: set[str] = set()
        # Tokens of guests that were handed over to another host.
        self._handed_over: set[tuple[str, str]] = set()
        for host in cloud.hosts.values():
            self._watch(host.name, host.driver.host)

    def _watch(self, name: str, host: MemoryHost) -> None:
        drop = host.drop_domain

        def record_and_drop(server: str) -> None:
            if server == self._server() and (guest := host.guests.get(server)) is not None:
                tokens_of_host = {token for token in self._tokens if token[1] == name}
                if guest.left:
                    self._handed_over |= tokens_of_host
                else:
                    self._dead |= {token for token, _ in tokens_of_host}
            drop(server)

        host.drop_domain = record_and_drop  # type: ignore[method-assign]

    def open(self) -> None:
        """Create a console token for the current guest, unless the server has none."""
        store, server = self._cloud.store, self._server()
        try:
            token = store.write(
                lambda tx: console_tokens.create(
                    tx, server, "novnc", project_id="p", user_id="u", seconds=LONG_SECONDS
                )
            )
        except errors.Conflict:
            return
        guest = store.read(lambda tx: console_tokens.find(tx, token))
        assert guest is not None, "a new token is refused"
        self._tokens.append((token, guest.host))

    def check(self) -> None:
        """Check that the tokens of removed guests open no console.

        The metadata of a deleted server must not be answered either. Call this when all actions
        have ended.
        """
        store, server = self._cloud.store, self._cloud.show(self._server())
        invalid = self._dead if not server.deleted else {token for token, _ in self._tokens}
        invalid |= {token for token, host in self._handed_over if host != server.host}
        for token in sorted(invalid):
            assert store.write(lambda tx, token=token: console_tokens.use(tx, token)) is None, (
                "a token of a guest that is gone opens a console"
            )
        if server.deleted:
            facts = store.read(lambda tx: metadata.facts(tx, server.id))
            assert facts is None, "the metadata service answers a deleted server with its metadata"
