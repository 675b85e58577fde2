# SPDX-License-Identifier: Apache-2.0
"""Consoles and metadata of guests that are gone: a console token is good for the guest that it was
made for, and for no other of the same server, there or elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.store.servers import console_tokens, metadata
from compute_agent.virt.memory.state.host import MemoryHost
from tests.workflows.simulator import Cloud

LONG_SECONDS = 10**7  #: longer than a cell takes


class Incarnations:
    """The tokens of one server; those of guests that its hosts have removed are dead. A guest that
    was handed over to another host is the same again when the server stays where it was."""

    def __init__(self, cloud: Cloud, server: Callable[[], str]) -> None:
        self._cloud, self._server = cloud, server
        self._tokens: list[tuple[str, str]] = []  # with the host
        self._dead: set[str] = set()
        self._left: set[tuple[str, str]] = set()  # whose guest was handed over
        for host in cloud.hosts.values():
            self._watch(host.name, host.driver.host)

    def _watch(self, name: str, host: MemoryHost) -> None:
        drop = host.drop_domain

        def dropped(server: str) -> None:
            if server == self._server() and (guest := host.guests.get(server)) is not None:
                of_host = {one for one in self._tokens if one[1] == name}
                if guest.left:
                    self._left |= of_host
                else:
                    self._dead |= {token for token, _ in of_host}
            drop(server)

        host.drop_domain = dropped  # type: ignore[method-assign]

    def open(self) -> None:
        """Somebody wants the console of the guest that is there now, if there is one."""
        store, server = self._cloud.store, self._server()
        try:
            token = store.write(
                lambda tx: console_tokens.create(
                    tx, server, "novnc", project_id="p", user_id="u", seconds=LONG_SECONDS
                )
            )
        except errors.Conflict:
            return
        found = store.read(lambda tx: console_tokens.find(tx, token))
        assert found is not None, "a new token is refused"
        self._tokens.append((token, found.host))

    def check(self) -> None:
        """All is quiet: no token of a guest that was removed opens anything."""
        store, server = self._cloud.store, self._cloud.show(self._server())
        gone = self._dead if not server.deleted else {token for token, _ in self._tokens}
        gone |= {token for token, host in self._left if host != server.host}
        for token in sorted(gone):
            assert store.write(lambda tx, token=token: console_tokens.use(tx, token)) is None, (
                "a token of a guest that is gone opens a console"
            )
        if server.deleted:
            told = store.read(lambda tx: metadata.facts(tx, server.id))
            assert told is None, "a guest that is gone would be told its metadata"
