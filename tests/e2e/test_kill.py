# SPDX-License-Identifier: Apache-2.0
"""Each process is killed during create, stop and delete, and the broker is wiped.

The cloud recovers without an operator.

For each victim, two guests are created, stopped and deleted. The victim is killed after the first
request is accepted, or for the agent after it has a command, while the other request is running. A
client without an answer repeats the request. Accepted requests must complete. After each action the
doctor must find no problem.
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
#: Status of a repeated request if the first was accepted and its answer lost.
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
    """Reset the broker, which loses its queues, messages and users."""
    for command in ("stop_app", "reset", "start_app"):
        Broker.of(cloud.cloud).control(command)


VICTIMS = {
    **{name: kill(name) for name in ("api", "conductor", "scheduler", "agent")},
    "broker": wipe,
}


class RequestsWithKill:
    """Parallel requests of several clients, during which the victim is killed."""

    def __init__(self, cloud: Live, victim: str) -> None:
        self.cloud, self.victim = cloud, victim
        self.rests = [cloud.rest() for _ in range(GUESTS)]

    def send_and_kill(
        self, request: Callable[[Rest, int], Reply], servers: Callable[[list[Reply]], list[str]]
    ) -> list[Reply]:
        """Send the requests, kill the victim, and return the answers in order."""
        with ThreadPoolExecutor(GUESTS) as pool:
            futures = [pool.submit(request, rest, number) for number, rest in enumerate(self.rests)]
            first = wait(futures, return_when=FIRST_COMPLETED).done
            if self.victim == "agent":
                struck_servers = servers([future.result() for future in first])
                await_true(
                    lambda: self.cloud.awaits_hosts(struck_servers),
                    30,
                    lambda: f"no host works for {struck_servers}",
                    pause=0.005,
                )
            VICTIMS[self.victim](self.cloud)
            return [future.result() for future in futures]

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
            self.send_and_kill(
                lambda rest, number: rest.insist(
                    "POST",
                    "/servers",
                    body,
                    expected=(202,),
                    headers={"Idempotency-Key": keys[number]},
                ),
                ids,
            )
        )

    def stop(self, servers: list[str]) -> None:
        self.send_and_kill(
            lambda rest, number: rest.insist(
                "POST",
                f"/servers/{servers[number]}/action",
                {"os-stop": None},
                expected=(202, DONE_BEFORE["stop"]),
            ),
            lambda replies: servers,
        )

    def delete(self, servers: list[str]) -> None:
        self.send_and_kill(
            lambda rest, number: rest.insist(
                "DELETE", f"/servers/{servers[number]}", expected=(204, DONE_BEFORE["delete"])
            ),
            lambda replies: servers,
        )


@pytest.mark.parametrize("victim", VICTIMS)
def test_servers_reach_states_when_process_is_killed_or_broker_wiped(
    cloud: Live, demo: Rest, victim: str
) -> None:
    requests = RequestsWithKill(cloud, victim)
    others = {server["id"] for server in demo.servers()}

    servers = requests.create()
    for server in servers:
        demo.await_status(server, "ACTIVE")
    # A repeated request must not create a second server.
    assert {server["id"] for server in demo.servers()} == others | set(servers)
    assert len(set(servers)) == GUESTS
    assert sorted(cloud.domains()) == sorted(others | set(servers))
    cloud.assert_healthy()
    for server in servers:
        # A ready guest reacts to the power button.
        demo.await_ready(server)

    requests.stop(servers)
    for server in servers:
        demo.await_status(server, "SHUTOFF")
        assert cloud.domain_state(server) == "shut off"
    cloud.assert_healthy()

    # The delete of a running guest takes longer, which the kill needs.
    for server in servers:
        demo.insist("POST", f"/servers/{server}/action", {"os-start": None}, expected=(202,))
    for server in servers:
        demo.await_status(server, "ACTIVE")
    requests.delete(servers)
    for server in servers:
        demo.await_gone(server)
    await_true(
        lambda: [cloud.leftovers(server) for server in servers] == [[]] * GUESTS,
        30,
        lambda: [cloud.leftovers(server) for server in servers],
    )
    assert sorted(cloud.domains()) == sorted(others)
