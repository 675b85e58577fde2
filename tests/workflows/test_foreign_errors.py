# SPDX-License-Identifier: Apache-2.0
"""Tests that the API never shows users the text of an unexpected exception.

Each test raises such an exception in a step of the conductor or in a verb of an agent. The real
API returns the text to admins only.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import falcon.testing
import pytest

from common.domain.models import Command
from common.domain.statuses import ActionState
from common.domain.verbs import Verb
from common.store.engine import Store
from compute_agent.verbs import CarryOut, Outcome, Tools, carry_out
from compute_api.compute import app
from compute_api.compute.request.dependencies import Services
from conductor.workflows import WORKFLOWS
from deploy.testing.plan import Slice
from tests.api.conftest import Agents, ConductorWakeup, Images, default_policy
from tests.workflows.moves import last
from tests.workflows.poison import Poison, poison
from tests.workflows.scenarios import SCENARIOS, trial_of
from tests.workflows.simulator import Cloud

CANARY = "canary-7d1f at /var/lib/canary in SELECT canary"
PARTS = ("prepare", "apply", "command", "on_start", "on_result", "call")
#: One in this number of cases is in the default set.
ONE_OF = 24


def _choose_slice(name: str) -> Any:
    return pytest.mark.slice(
        Slice.DEFAULT if zlib.crc32(name.encode()) % ONE_OF == 0 else Slice.GUESTS
    )


STEPS = [
    pytest.param(name, step.name, part, marks=_choose_slice(f"{name}{step.name}{part}"))
    for name, scenario in SCENARIOS.items()
    if not scenario.brief and name in WORKFLOWS
    for step in WORKFLOWS[name].steps
    for part in PARTS
    if getattr(step, part) is not None
]
IN_VERBS = [
    pytest.param(name, verb, marks=_choose_slice(f"{name}{verb}"))
    for name, scenario in SCENARIOS.items()
    if not scenario.brief
    for verb in scenario.verbs
]


@lru_cache(maxsize=1)
def create_api(store: Store) -> Any:
    """Create the API over a simulated cloud."""
    return app.create(Services(store, ConductorWakeup(), Agents(), Images()), default_policy())


def read_api_texts(cloud: Cloud, server: str, role: str) -> str:
    """Return all texts about a server that the API returns to a user with this role."""
    client = falcon.testing.TestClient(create_api(cloud.store))
    headers = {
        "X-Identity-Status": "Confirmed",
        "X-User-Id": "user",
        "X-Project-Id": "project",
        "X-Roles": role,
        "OpenStack-API-Version": "compute 2.103",
    }

    def get(path: str) -> Any:
        return client.simulate_get("/v2.1" + path, headers=headers)

    action_list = get(f"/servers/{server}/os-instance-actions")
    paths = [
        f"/servers/{server}",
        "/servers/detail",
        f"/servers/{server}/migrations",
        "/os-migrations",
        *(
            f"/servers/{server}/os-instance-actions/{action['request_id']}"
            for action in action_list.json.get("instanceActions", ())
        ),
    ]
    return action_list.text + "".join(get(path).text for path in paths)


def check_users_cannot_read(cloud: Cloud, server: str) -> None:
    for role in ("reader", "member", "manager"):
        assert "canary" not in read_api_texts(cloud, server, role)


@pytest.mark.parametrize(("workflow", "step", "part"), STEPS)
def test_api_hides_exception_in_conductor_step_from_users(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, workflow: str, step: str, part: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None  # The watcher would report the stuck action.
    ids = [trial.server] if trial.server else []
    poison(monkeypatch, workflow, step, part, ids, CANARY)
    trial.begin()
    ids.append(trial.server)
    check_users_cannot_read(cloud, trial.server)
    for _ in range(30):
        cloud.round()
        if (
            not cloud.show(trial.server).action
            or last(cloud, trial.server).state == ActionState.STUCK
        ):
            break
        cloud.time.pass_by(10)
    check_users_cannot_read(cloud, trial.server)


def break_verb(name: str) -> CarryOut:
    """Return a function that fails in this verb and carries out all other verbs."""

    def carry_out_or_fail(tools: Tools, command: Command, verb: Verb) -> Outcome:
        if verb.name == name:
            raise Poison(CANARY)
        return carry_out(tools, command, verb)

    return carry_out_or_fail


@pytest.mark.parametrize(("workflow", "verb"), IN_VERBS)
def test_api_hides_exception_in_agent_verb_from_users(
    cloud: Cloud, workflow: str, verb: str
) -> None:
    trial = trial_of(cloud, workflow)
    cloud.watcher = lambda: None
    for host in cloud.hosts.values():
        host.carry_out_verb = break_verb(verb)
    trial.begin()
    for _ in range(8):
        cloud.round()
    check_users_cannot_read(cloud, trial.server)


def test_api_shows_exception_text_to_admins(cloud: Cloud) -> None:
    """This proves that the other tests read all places with the text."""
    trial = trial_of(cloud, "rebuild")
    for host in cloud.hosts.values():
        host.carry_out_verb = break_verb("rebuild")
    trial.begin()
    cloud.settle()
    assert "The host failed unexpectedly; its log says more." in read_api_texts(
        cloud, trial.server, "member"
    )
    assert CANARY in read_api_texts(cloud, trial.server, "admin")
    check_users_cannot_read(cloud, trial.server)
