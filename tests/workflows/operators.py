# SPDX-License-Identifier: Apache-2.0
"""Operators of the simulator's cloud, who give ``kilonova host`` commands at a terminal."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.store import migrations, services
from deploy.cli import drain, evacuate
from deploy.cli.moving import Hands
from tests.workflows.simulator import Cloud


def never() -> bool:
    return False


@dataclass
class Operator:
    """One at a terminal: a second of theirs is a round of the cloud. ``stops``: whether they have pressed Ctrl-C."""

    cloud: Cloud
    stops: Callable[[], bool] = never
    said: list[str] = field(default_factory=list)
    patience: int = 600

    def hands(self) -> Hands:
        return Hands(self.cloud.store, self.cloud.select, lambda: None, self.sleep, self.said.append,
                     lambda: self.stops())

    def sleep(self, seconds: float) -> None:
        self.patience -= 1
        assert self.patience > 0, "it never ends: " + "\n".join(self.said[-20:])
        self.cloud.round()

    def drain(self, host: str = "h1", *, cold: bool = False, dry_run: bool = False, parallel: int = 2,
              wait: bool = False) -> int:
        return drain.empty(self.hands(), host, cold=cold, dry_run=dry_run, parallel=parallel, wait=wait)

    def evacuate(self, host: str = "h1", *, has_hook: bool = False, dry_run: bool = False, insists: bool = False
                 ) -> int:
        return evacuate.leave(self.hands(), host, has_hook=has_hook, silence=30, dry_run=dry_run, insists=insists)

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def kinds(cloud: Cloud) -> dict[str, str]:
    """The type of the last move of each server that has one."""
    return {row.server_id: row.type for row in cloud.store.read(migrations.page)}


def silence(cloud: Cloud, host: str) -> None:
    """The host is cut off until it counts as down."""
    cloud.cut.add(host)
    for _ in range(8):
        cloud.time.pass_by(9)
        cloud.round()
    assert not cloud.store.read(lambda tx: services.is_up(tx, host))
