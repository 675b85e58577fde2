# SPDX-License-Identifier: Apache-2.0
"""How each workflow is asked for and how its server ends; used by the tests of this ring."""
from __future__ import annotations

from dataclasses import dataclass, field

from common import states
from tests.workflows.simulator import Cloud, Crash


@dataclass
class Scenario:
    """How a workflow is asked for, and how its server ends: (vm_state, number of domains)."""

    ask: tuple[str, str | None]
    ends: str
    domains: int = 1
    before: tuple[tuple[str, str | None], ...] = ()
    fails_as: str = states.ACTIVE
    verb: str = ""


SCENARIOS = {
    "create": Scenario(("create", None), states.ACTIVE, fails_as=states.ERROR, verb="ensure_guest"),
    "stop": Scenario(("os-stop", None), states.STOPPED, verb="ensure_stopped"),
    "start": Scenario(("os-start", None), states.ACTIVE, before=(("os-stop", None),), fails_as=states.STOPPED,
                      verb="ensure_running"),
    "reboot_soft": Scenario(("reboot", "SOFT"), states.ACTIVE, fails_as=states.ERROR, verb="reboot"),
    "reboot_hard": Scenario(("reboot", "HARD"), states.ACTIVE, fails_as=states.ERROR, verb="reboot"),
    "delete": Scenario(("delete", None), states.DELETED, domains=0),
}


@dataclass
class Trial:
    """A cloud just before a workflow is asked for."""

    cloud: Cloud
    scenario: Scenario
    server: str = ""
    hits: list[tuple[str, ...]] = field(default_factory=list)

    def begin(self) -> None:
        if self.scenario.ask[0] == "create":
            self.server = self.cloud.create()[0]
        else:
            self.cloud.ask(self.server, *self.scenario.ask)

    def crash_at(self, number: int) -> None:
        """Kill the process that reaches the fault point with this number; -1: only write the points down."""
        def conductor(workflow: str, step: str, where: str) -> None:
            self._hit(("conductor", workflow, step, where), number)

        def agent(verb: str, step: str, where: str) -> None:
            self._hit(("agent", verb, step, where), number)
        self.cloud.engine.fault_point = conductor
        for host in self.cloud.hosts.values():
            host.fault_point = agent

    def _hit(self, point: tuple[str, ...], number: int) -> None:
        if point[1] == "sweep":
            return
        self.hits.append(point)
        if len(self.hits) - 1 == number:
            raise Crash(point)

    def run_through_crashes(self) -> None:
        """Rounds until nothing is in hand; who crashes is started again."""
        for _ in range(3):
            try:
                self.cloud.settle()
                return
            except Crash as crash:
                if crash.args[0][0] == "agent":
                    for host in self.cloud.hosts.values():
                        host.restart()
                else:
                    self.cloud.restart_conductor()
        raise AssertionError("crashed more than once")

    def is_right(self, ends: str, domains: int) -> None:
        server = self.cloud.show(self.server)
        assert (server.vm_state, server.task_state, server.action) == (ends, None, None), server.fault
        assert len(self.cloud.domains(self.server)) == domains
        assert self.cloud.findings() == []


def trial_of(cloud: Cloud, workflow: str) -> Trial:
    scenario = SCENARIOS[workflow]
    cloud.round()
    trial = Trial(cloud, scenario)
    if scenario.ask[0] != "create":
        trial.server = cloud.create()[0]
        cloud.settle()
        for key, value in scenario.before:
            cloud.ask(trial.server, key, value)
            cloud.settle()
    cloud.sent.clear()
    return trial
