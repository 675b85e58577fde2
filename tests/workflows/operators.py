# SPDX-License-Identifier: Apache-2.0
"""The commands ``kilonova host drain`` and ``kilonova host evacuate`` on a simulated cloud."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.store.hosts import host_actions, services
from common.store.hosts.host_actions import Arguments, HostAction, Name
from common.store.servers import migrations
from deploy.operator.hosts import actions as commands
from tests.workflows.simulator import Cloud

BY_DEFAULT = Arguments()


def never() -> bool:
    return False


@dataclass
class Operator:
    """An operator at a terminal. Each second of a command's sleep is a round of the cloud."""

    cloud: Cloud
    #: Called each second. True gives the command with --stop, as at another terminal.
    stops: Callable[[], bool] = never
    #: The lines that the commands printed.
    said: list[str] = field(default_factory=list)
    #: Rounds until a command counts as endless and fails the test.
    seconds_left: int = 600
    #: The host of the last command.
    host: str = ""

    def sleep(self, seconds: float) -> None:
        self.seconds_left -= 1
        assert self.seconds_left > 0, "it never ends: " + "\n".join(self.said[-20:])
        if self.stops():
            action = self.cloud.store.read(lambda tx: host_actions.open_of(tx, self.host))
            if action is not None:
                self.cloud.store.write(lambda tx: host_actions.stop(tx, action.id))
        self.cloud.round()

    def drain(
        self,
        host: str = "h1",
        *,
        cold: bool = False,
        dry_run: bool = False,
        parallel: int = 2,
        wait: bool = False,
    ) -> int:
        return self._run(host, Name.DRAIN, Arguments(cold, parallel, wait), dry_run)

    def evacuate(self, host: str = "h1", *, dry_run: bool = False, force: bool = False) -> int:
        return self._run(host, Name.EVACUATE, Arguments(force=force), dry_run)

    def _run(self, host: str, name: Name, args: Arguments, dry_run: bool) -> int:
        self.host = host
        if dry_run:
            return commands.rehearse(
                self.cloud.store,
                self.cloud.select,
                host,
                name,
                args,
                self.said.append,
                has_hook=self.cloud.engine.fence_host is not None,
                silence=30,
            )
        return commands.watch(
            self.cloud.store, self.begin(host, name, args), self.sleep, self.said.append
        )

    def begin(self, host: str, name: Name, args: Arguments = BY_DEFAULT) -> HostAction:
        return commands.begin(self.cloud.store, host, name, args, self.said.append)

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def kinds(cloud: Cloud) -> dict[str, str]:
    """Return the type of the newest migration of each server with a migration."""
    return {row.server_id: row.type for row in cloud.store.read(migrations.page)}


def silence(cloud: Cloud, host: str) -> None:
    """Cut the host off from the network, and run rounds until its service counts as down."""
    cloud.cut.add(host)
    for _ in range(8):
        cloud.time.pass_by(9)
        cloud.round()
    assert not cloud.store.read(lambda tx: services.is_up(tx, host))
