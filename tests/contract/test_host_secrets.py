# SPDX-License-Identifier: Apache-2.0
"""Renewal of host keys, broker passwords and broker addresses over a real RabbitMQ.

An operator changes a secret in three steps: the new secret is added, becomes the first, and the old
one is removed. After each step hosts and control plane understand each other, without a restart of
an agent. docs/secrets.md describes the steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from common.domain.models import Heartbeat, HeartbeatAnswer
from common.rpc import agent, conductor
from common.rpc.broker import opener
from common.rpc.host_credentials import HostSecretsClient
from common.rpc.host_link import ControlSide, HostSide
from common.security.host_keys import Generations, OwnKeys, Purpose
from compute_agent.host_secrets import (
    PAUSE_SECONDS,
    SETTLE_SECONDS,
    KeyFile,
    LiveKeys,
    SecretsKeeper,
)
from conductor.hosts.host_credentials import HostSecretsSource
from tests.contract.test_host_link import SECRETS, World
from tests.contract.test_rpc import CallRecorder
from tests.log_lines import rendered_lines
from tests.unit.compute_agent.test_sync import ManualClock
from tests.waiting import await_true

OLD = SECRETS
BOTH = {purpose: f"{secret}, new {purpose}" for purpose, secret in OLD.items()}
SWAPPED = {purpose: f"new {purpose},{secret}" for purpose, secret in OLD.items()}
NEW = {purpose: f"new {purpose}" for purpose in OLD}


@dataclass
class Rig:
    """A host, and a control plane whose configuration changes with ``configure``."""

    world: World
    file: KeyFile
    keys: LiveKeys
    link: HostSide
    clock: ManualClock
    keeper: SecretsKeeper
    control: ControlSide | None = None
    source: HostSecretsSource | None = None

    def configure(self, secrets: dict[Purpose, str], brokers: tuple[str, ...] = ()) -> None:
        """Replace the conductor by one with these secrets, and let the agent's pause end."""
        self.clock.seconds += SETTLE_SECONDS
        if self.control is not None:
            self.control.close()
        keys = self.world.keys(secrets)
        self.source = HostSecretsSource(keys, brokers)
        self.control = ControlSide(
            opener(self.world.conf, self.world.url), keys, self.world.prefix, self.world.role
        )
        self.world.opened.append(self.control)
        recorder = CallRecorder(HeartbeatAnswer(True, secrets=self.source.digest("h1")))
        conductor.listen(self.control, recorder, secrets=self.source)
        assert self.control.wait_until_ready(30)

    def send_heartbeat(self) -> None:
        """Send a heartbeat, and let the keeper compare the digest in the answer."""

        def send() -> Any:
            return conductor.ConductorClient(self.link).heartbeat(Heartbeat("h1", 3), 5)

        self.keeper.compare(await_true(send, 30, "a conductor answers").secrets)

    def is_current(self) -> bool:
        assert self.source is not None
        return self.keys.own.fetched == self.source.digest("h1")

    def query(self) -> object:
        """Send a query of the control plane to the host, and return the answer."""
        assert self.control is not None
        return agent.AgentClient(self.control).query("h1", "v", {})


def make_rig(world: World, folder: Path, url: str) -> Rig:
    """Return a rig whose host connects to the broker at ``url``."""
    file, clock = KeyFile(folder / "host.key", world.conf), ManualClock()
    keys = LiveKeys(replace(world.keys(OLD).for_host("h1"), transport_url=url), clock)
    link = HostSide(file.connect(keys.own), keys, "h1", world.prefix)
    world.opened.append(link)
    keeper = SecretsKeeper(file, keys, HostSecretsClient(link), link.change_broker, clock)
    return Rig(world, file, keys, link, clock, keeper)


@pytest.fixture
def world(rabbitmq_url: str) -> Iterator[World]:
    world = World(rabbitmq_url)
    yield world
    world.close()


@pytest.fixture
def rig(world: World, tmp_path: Path) -> Rig:
    return make_rig(world, tmp_path, world.url)


def test_host_follows_change_of_both_secrets_step_by_step(rig: Rig) -> None:
    recorder = CallRecorder({"x": 1})
    rig.configure(OLD)
    agent.serve(rig.link, recorder)
    for secrets in (OLD, BOTH, SWAPPED, NEW):
        rig.configure(secrets)
        rig.send_heartbeat()
        assert rig.is_current(), secrets
        rig.query()
        assert OwnKeys.read(rig.file.path, "h1") == rig.keys.own
    assert len(recorder.calls) == 4
    assert rig.keys.own.secrets == rig.world.keys(NEW).for_host("h1").secrets
    assert (rig.keys.own.others, rig.keys.own.other_passwords) == ({}, ())


def test_host_fetches_rarely_while_conductors_have_different_secrets(rig: Rig) -> None:
    """An operator restarts one conductor after the other, and each answer has another digest."""
    rig.configure(BOTH)
    rig.send_heartbeat()
    first = rig.keys.own
    assert not any(rig.keeper.compare(f"other {number}") for number in range(9))
    assert rig.keys.own is first
    rig.clock.seconds += SETTLE_SECONDS
    assert rig.keeper.compare("other") and rig.keys.own is not first


def test_conductor_refuses_host_without_new_secret(rig: Rig) -> None:
    rig.configure(NEW)
    assert conductor.ConductorClient(rig.link).heartbeat(Heartbeat("h1", 3), 1) is None
    assert rig.control is not None and rig.control.refusals.counted["h1"] > 0


def test_host_fetches_new_generation_while_previous_is_valid(rig: Rig) -> None:
    rig.configure(OLD)
    agent.serve(rig.link, CallRecorder({"x": 1}))
    rig.world.generations["h1"] = Generations(2, accepts_previous=True)
    rig.configure(OLD)
    rig.send_heartbeat()
    assert rig.keys.own.generation == 2
    rig.world.generations["h1"] = Generations(2)
    rig.configure(OLD)
    rig.send_heartbeat()
    rig.query()
    assert rig.is_current()


def test_secrets_digest_changes_with_generation_secrets_and_addresses(world: World) -> None:
    digests = {HostSecretsSource(world.keys(OLD)).digest("h1")}
    digests |= {HostSecretsSource(world.keys(secrets)).digest("h1") for secrets in (BOTH, NEW)}
    digests.add(HostSecretsSource(world.keys(OLD), ["192.0.2.1"]).digest("h1"))
    source = HostSecretsSource(world.keys(OLD))
    for generations in (Generations(2, True), Generations(2)):
        world.generations["h1"] = generations
        digests.add(source.digest("h1"))
    assert len(digests) == 6
    assert HostSecretsSource(world.keys(OLD)).digest("strange") == ""
    assert HostSecretsSource(world.keys({Purpose.QUERY: "q"})).digest("h1") == ""


def test_host_uses_new_address_of_broker_after_it_has_connected_there(rig: Rig) -> None:
    parts = urlsplit(rig.world.url)
    rig.configure(OLD, (f"localhost:{parts.port}",))
    rig.send_heartbeat()
    assert urlsplit(rig.keys.own.transport_url).hostname == "localhost"
    rig.send_heartbeat()
    assert [urlsplit(url).hostname for url in rig.link._connect.urls] == ["localhost"]


def test_host_keeps_address_if_new_one_does_not_answer(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.configure(BOTH, ("127.0.0.1:1",))
    rig.send_heartbeat()
    assert rig.keys.own.transport_url == rig.world.url and not rig.is_current()
    assert not rig.file.path.exists()
    [line] = [line for line in rendered_lines(caplog) if "are not renewed" in line]
    assert "docs/secrets.md" in line
    rig.configure(BOTH)
    rig.send_heartbeat()
    assert not rig.is_current(), "the agent waits after a failure"
    rig.clock.seconds += PAUSE_SECONDS
    rig.send_heartbeat()
    assert rig.is_current()
