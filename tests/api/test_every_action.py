# SPDX-License-Identifier: Apache-2.0
"""A sample of all actions over HTTP, against hand-written rules.

Further tests send two actions at the same time, and repeat each action.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids, states
from common.domain.models import Interface
from common.domain.wire import to_wire
from common.store import schema
from tests import allowed
from tests.api.conftest import PROJECT, Cloud
from tests.api.networks import Networks

#: The sample contains each action of a member on a resting server, and one of so many other cases.
#: The default set contains a member's actions on an active server, and a third of those on servers
#: in other resting states.
ONE_OF, ONE_OF_BY_DEFAULT = 23, 101
TASKS = (None, "rebooting", "spawning", "image_uploading", "deleting")


def cases(one_of: int, one_of_resting: int = 1) -> list[tuple[Any, ...]]:
    """Return the sampled cases as (action, vm_state, task_state, locked, persona).

    Each case is chosen by a hash of itself, so new cases do not change the sample.
    """
    every = itertools.product(
        sorted(allowed.ALL), states.VM_STATES, TASKS, (False, True), sorted(allowed.PERSONAS)
    )

    def is_tried(case: tuple[Any, ...]) -> bool:
        is_resting, number = case[2:] == (None, False, "user"), zlib.crc32(repr(case).encode())
        if is_resting and case[1] == "active":
            return True
        return number % (one_of_resting if is_resting else one_of) == 0

    return [case for case in every if case[1] != "deleted" and is_tried(case)]


@pytest.fixture
def furnished_cloud(make_cloud: Callable[..., Cloud], networks: Networks) -> tuple[Cloud, str]:
    """Return a cloud without missing prerequisites, and a server.

    The server has a finished migration and a port in the security group "web", so no action is
    refused for a missing prerequisite.
    """
    cloud: Cloud = make_cloud(secret_key="k", networks=networks)
    cloud.add_host("host2")
    server, red = cloud.create(), networks.add_network("red", PROJECT)
    port = networks.add_port(
        red, PROJECT, device_id=server, security_groups=[networks.add_group("web", PROJECT)]
    )
    cloud.set_state(server, interfaces=[to_wire(Interface(port, red))])
    [action] = cloud.rows(schema.actions)
    with cloud.store.begin() as tx:
        tx.execute(
            sa.insert(schema.migrations),
            {
                "uuid": ids.new(),
                "server_id": server,
                "action_id": action.id,
                "project_id": PROJECT,
                "user_id": "u1",
                "type": "resize",
                "status": "finished",
                "source_host": "host2",
                "dest_host": "host1",
                "old_flavor": {},
                "new_flavor": {},
                "was": "active",
                "created_at": 0,
                "updated_at": 0,
            },
        )
    return cloud, server


def prepare(cloud: Cloud, server: str, name: str, vm_state: str, **values: Any) -> None:
    """Create the prerequisites of the rules: a migration to end, and a dead host for evacuate."""
    cloud.set_state(server, vm_state, **values)
    cloud.change(schema.migrations, schema.migrations.c.source_host == "host2", status="finished")
    cloud.change(schema.services, schema.services.c.host == "host1", forced_down=name == "evacuate")


def request_action(cloud: Cloud, server: str, name: str, token: str = "user") -> Any:
    if name == "delete":
        return cloud.call("DELETE", f"/servers/{server}", token=token)
    return cloud.call(
        "POST",
        f"/servers/{server}/action",
        {name.partition(" ")[0]: allowed.ALL[name].body},
        mv="2.17",
        token=token,
    )


@pytest.mark.parametrize(
    ("one_of", "one_of_resting"),
    [(ONE_OF_BY_DEFAULT, 3), pytest.param(ONE_OF, 1, marks=pytest.mark.slice("operations"))],
)
def test_server_action_returns_status_of_rules_for_each_state_and_role(
    furnished_cloud: tuple[Cloud, str], one_of: int, one_of_resting: int
) -> None:
    """All cases share one cloud, because creating a cloud takes longer than a request."""
    cloud, server = furnished_cloud
    results, differences = set(), []
    for name, vm_state, task_state, locked, token in cases(one_of, one_of_resting):
        prepare(
            cloud,
            server,
            name,
            vm_state,
            task_state=task_state,
            action="held" if task_state else None,
            locked=locked,
            locked_by="owner" if locked else None,
        )
        before = cloud.rows(schema.servers)[0]
        answer = request_action(cloud, server, name, token)
        after = cloud.rows(schema.servers)[0]
        expected = allowed.status(name, allowed.PERSONAS[token], vm_state, task_state, locked)
        task = allowed.task_after(name, task_state) if expected < 300 else task_state
        if (answer.status_code, after.task_state) != (expected, task) or (
            expected >= 300 and after != before
        ):
            differences.append(
                (
                    name,
                    vm_state,
                    task_state,
                    locked,
                    token,
                    answer.status_code,
                    expected,
                    answer.text,
                )
            )
        results.add((name, expected))
    assert differences == []
    assert {name for name, _ in results} == set(allowed.ALL)
    assert {status for _, status in results} == {200, 202, 204, 403, 404, 409}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("os-stop", "pause"),
        ("rebuild", "reboot SOFT"),
        ("shelve", "rescue"),
        ("createImage", "suspend"),
        ("os-stop", "os-stop"),
        ("reboot SOFT", "reboot SOFT"),
    ],
)
def test_two_concurrent_actions_on_a_server_give_one_success_and_one_409(
    make_cloud: Any, first: str, second: str
) -> None:
    cloud: Cloud = make_cloud(secret_key="k")
    server = cloud.create()
    for _ in range(5):
        cloud.set_state(server)
        start, answers = threading.Barrier(2), []

        def request_at_start(
            name: str, start: threading.Barrier = start, answers: list[Any] = answers
        ) -> None:
            start.wait(10)
            answers.append(request_action(cloud, server, name))

        threads = [
            threading.Thread(target=request_at_start, args=(name,)) for name in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        winner, loser = sorted(answers, key=lambda answer: answer.status_code)
        assert winner.status_code in (200, 202), winner.text
        assert loser.status_code == 409
        [row] = cloud.rows(schema.servers)
        assert loser.json["conflictingRequest"]["message"].endswith(
            f"instance {server} while it is in task_state {row.task_state}"
        )
        live = [action for action in cloud.rows(schema.actions) if action.fence == row.fence]
        assert [action.id for action in live] == [row.action]


@pytest.mark.parametrize("name", sorted(set(allowed.ALL) - {"trigger_crash_dump"}))
def test_repeated_server_action_changes_no_state_even_if_accepted_again(
    furnished_cloud: tuple[Cloud, str], name: str
) -> None:
    """A client that lost the first answer repeats its request."""
    cloud, server = furnished_cloud
    rule = allowed.ALL[name]
    prepare(cloud, server, name, (rule.vm or "active").split()[0])
    assert request_action(cloud, server, name, "admin").status_code == rule.ok
    first = cloud.rows(schema.servers)[0]
    second_status = request_action(cloud, server, name, "admin").status_code
    second = cloud.rows(schema.servers)[0]
    assert second_status in (rule.ok, 409)
    state = ("vm_state", "task_state", "locked", "locked_by", "locked_reason", "image_id", "name")
    assert [getattr(first, column) for column in state] == [
        getattr(second, column) for column in state
    ]
    if second_status == 409:
        assert first == second
