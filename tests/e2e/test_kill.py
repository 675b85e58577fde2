# SPDX-License-Identifier: Apache-2.0
"""Every process is killed in the middle of create, stop and delete, and the broker forgets
everything: nobody helps.

One story a victim: two guests are made, stopped and deleted, and each time the victim is struck
once the first request was accepted, or for the agent once it was told what to do, while the other
request is on its way. A client that got no answer asks again; what was answered 202 must come to
its end. After each act the oracle is asked.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.live import Live, Reply, Rest
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

GUESTS = 2
#: Answers of a second try after the first one's answer was lost: it had been accepted.
DONE_BEFORE = {"stop": 409, "delete": 404}


def kill(process: str) -> Callable[[Live], None]:
    def strike(cloud: Live) -> None:
        pid = process_control.kill(cloud.cloud, process)
        await_true(
            lambda: find_process(cloud.cloud, process) not in (None, pid),
            30,
            lambda: f"{process} does not come back",
        )

    return strike


def wipe(cloud: Live) -> None:
    """The broker loses its queues, its messages and its users, and comes back empty."""
    for command in ("stop_app", "reset", "start_app"):
        Broker.of(cloud.cloud).control(command)


VICTIMS = {
    **{name: kill(name) for name in ("api", "conductor", "scheduler", "agent")},
    "broker": wipe,
}


class Act:
    """Requests of several clients at once, and a blow in their middle."""

    def __init__(self, cloud: Live, victim: str) -> None:
        self.cloud, self.victim = cloud, victim
        self.rests = [cloud.rest() for _ in range(GUESTS)]

    def play(
        self, request: Callable[[Rest, int], Reply], servers: Callable[[list[Reply]], list[str]]
    ) -> list[Reply]:
        """Send them all, strike, and return the answers in order."""
        with ThreadPoolExecutor(GUESTS) as pool:
            sent = [pool.submit(request, rest, number) for number, rest in enumerate(self.rests)]
            first = wait(sent, return_when=FIRST_COMPLETED).done
            if self.victim == "agent":
                named = servers([one.result() for one in first])
                await_true(
                    lambda: self.cloud.at_work(named),
                    30,
                    lambda: f"no host works for {named}",
                    pause=0.005,
                )
            VICTIMS[self.victim](self.cloud)
            return [one.result() for one in sent]

    def create(self) -> list[str]:
        body = {
            "server": {
                "name": f"struck-{self.victim}",
                "imageRef": self.cloud.image(),
                "networks": "none",
                "flavorRef": self.cloud.flavor(),
            }
        }
        keys = [str(uuid.uuid4()) for _ in range(GUESTS)]

        def ids(replies: list[Reply]) -> list[str]:
            return [reply.body["server"]["id"] for reply in replies]

        return ids(
            self.play(
                lambda rest, number: rest.insist(
                    "POST", "/servers", body, fine=(202,), headers={"Idempotency-Key": keys[number]}
                ),
                ids,
            )
        )

    def stop(self, servers: list[str]) -> None:
        self.play(
            lambda rest, number: rest.insist(
                "POST",
                f"/servers/{servers[number]}/action",
                {"os-stop": None},
                fine=(202, DONE_BEFORE["stop"]),
            ),
            lambda replies: servers,
        )

    def delete(self, servers: list[str]) -> None:
        self.play(
            lambda rest, number: rest.insist(
                "DELETE", f"/servers/{servers[number]}", fine=(204, DONE_BEFORE["delete"])
            ),
            lambda replies: servers,
        )


@pytest.mark.parametrize("victim", VICTIMS)
def test_servers_reach_their_state_without_help(cloud: Live, demo: Rest, victim: str) -> None:
    act = Act(cloud, victim)
    others = {server["id"] for server in demo.servers()}

    servers = act.create()
    for server in servers:
        demo.await_status(server, "ACTIVE")
    assert {server["id"] for server in demo.servers()} == others | set(servers)  # none doubled
    assert len(set(servers)) == GUESTS
    assert sorted(cloud.domains()) == sorted(others | set(servers))
    cloud.judge()
    for server in servers:
        demo.await_ready(server)  # from now on it obeys its power button

    act.stop(servers)
    for server in servers:
        demo.await_status(server, "SHUTOFF")
        assert cloud.domain_state(server) == "shut off"
    cloud.judge()

    for server in servers:  # it takes a moment to remove a guest that runs
        demo.insist("POST", f"/servers/{server}/action", {"os-start": None}, fine=(202,))
    for server in servers:
        demo.await_status(server, "ACTIVE")
    act.delete(servers)
    for server in servers:
        demo.await_gone(server)
    await_true(
        lambda: [cloud.remains(server) for server in servers] == [[]] * GUESTS,
        30,
        lambda: [cloud.remains(server) for server in servers],
    )
    assert sorted(cloud.domains()) == sorted(others)
