# SPDX-License-Identifier: Apache-2.0
"""How each workflow is asked for and how its server ends; used by the tests of this ring."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common import states
from tests.workflows.simulator import FLAVOR, Cloud, Crash


@dataclass
class Scenario:
    """How a workflow is asked for ("key" or "key:VALUE"), and how its server ends: vm_state, number of domains, number
    of images in the image service. ``before``: what was asked before; ``verb``: of its host step; ``fails_as``: the
    vm_state when that fails, ``fails_with``: the domains then. ``placed``: the server is in a hard group and has CPUs
    of its own."""

    ask: str
    ends: str
    domains: int = 1
    images: int = 0
    before: tuple[str, ...] = ()
    fails_as: str = states.ACTIVE
    fails_with: int = 1
    fails_images: int = 0
    verb: str = ""
    placed: bool = False


SCENARIOS = {
    "create": Scenario("create", states.ACTIVE, fails_as=states.ERROR, fails_with=0, verb="ensure_guest"),
    "stop": Scenario("os-stop", states.STOPPED, verb="ensure_stopped"),
    "start": Scenario("os-start", states.ACTIVE, before=("os-stop",), fails_as=states.STOPPED, verb="ensure_running"),
    "reboot_soft": Scenario("reboot:SOFT", states.ACTIVE, fails_as=states.ERROR, verb="reboot"),
    "reboot_hard": Scenario("reboot:HARD", states.ACTIVE, fails_as=states.ERROR, verb="reboot"),
    "pause": Scenario("pause", states.PAUSED, verb="ensure_paused"),
    "unpause": Scenario("unpause", states.ACTIVE, before=("pause",), fails_as=states.PAUSED, verb="ensure_running"),
    "suspend": Scenario("suspend", states.SUSPENDED, verb="ensure_suspended"),
    "resume": Scenario("resume", states.ACTIVE, before=("suspend",), fails_as=states.SUSPENDED, verb="ensure_running"),
    "crash_dump": Scenario("trigger_crash_dump", states.ACTIVE, verb="inject_nmi"),
    "change_password": Scenario("changePassword", states.ACTIVE, verb="set_password"),
    "rescue": Scenario("rescue", states.RESCUED, fails_as=states.ERROR, verb="rescue"),
    "unrescue": Scenario("unrescue", states.ACTIVE, before=("rescue",), fails_as=states.ERROR, verb="unrescue"),
    "rebuild": Scenario("rebuild", states.ACTIVE, fails_as=states.ERROR, verb="rebuild"),
    "snapshot": Scenario("createImage", states.ACTIVE, images=1, verb="snapshot"),
    "backup": Scenario("createBackup", states.ACTIVE, images=1, verb="snapshot"),
    "shelve": Scenario("shelve", states.SHELVED, images=1, verb="snapshot"),
    "offload": Scenario("shelveOffload", states.SHELVED_OFFLOADED, domains=0, images=1, before=("shelve",)),
    "unshelve": Scenario("unshelve", states.ACTIVE, before=("shelve", "shelveOffload"), verb="ensure_guest",
                         fails_as=states.SHELVED_OFFLOADED, fails_with=0, fails_images=1),
    "unshelve_here": Scenario("unshelve", states.ACTIVE, before=("shelve",), verb="ensure_running",
                              fails_as=states.SHELVED, fails_images=1),
    "soft_delete": Scenario("softDelete", states.SOFT_DELETED, verb="ensure_stopped"),
    "restore": Scenario("restore", states.ACTIVE, before=("softDelete",), verb="ensure_running",
                        fails_as=states.SOFT_DELETED),
    "attach_interface": Scenario("attach_interface", states.ACTIVE, verb="attach_interface"),
    "detach_interface": Scenario("detach_interface", states.ACTIVE, verb="detach_interface"),
    "add_security_group": Scenario("addSecurityGroup", states.ACTIVE),
    "remove_security_group": Scenario("removeSecurityGroup", states.ACTIVE, before=("addSecurityGroup",)),
    "delete": Scenario("delete", states.DELETED, domains=0),
}
#: The same workflows, when placement has more to keep.
SCENARIOS |= {f"{name}:placed": replace(SCENARIOS[name], placed=True) for name in ("create", "unshelve", "delete")}
PINNED = replace(FLAVOR, vcpus=2, extra_specs={"hw:cpu_policy": "dedicated"})

#: What the API freezes of a request, by the action's key.
ARGS: dict[str, dict[str, Any]] = {
    "createImage": {"image_id": "11111111-1111-4111-8111-111111111111", "name": "snap"},
    "createBackup": {"image_id": "22222222-2222-4222-8222-222222222222", "name": "backup", "backup_type": "daily",
                     "rotation": 1},
    "shelve": {"image_id": "33333333-3333-4333-8333-333333333333", "name": "s-shelved"},
    "attach_interface": {"networks": [{"network": "n2", "tag": "blue"}]},
    "addSecurityGroup": {"group": "g1", "name": "web"},
    "removeSecurityGroup": {"group": "g1", "name": "web"},
    "rebuild": {"before": {"image_id": None, "image": None}},
    "rescue": {"image": {"id": "44444444-4444-4444-8444-444444444444"}},
}
SECRETS = {"changePassword": {"admin_pass": "new"}, "rescue": {"admin_pass": "new"}}


def ask(cloud: Cloud, server: str, wanted: str) -> None:
    """Ask for an action as the API does."""
    key, _, value = wanted.partition(":")
    args = ARGS.get(key)
    if key == "detach_interface":
        args = {"port": cloud.show(server).interfaces[0]["port"]}
    cloud.ask(server, key, value or None, args, SECRETS.get(key))


def create(cloud: Cloud, scenario: Scenario) -> str:
    """The scenario's server."""
    if not scenario.placed:
        return cloud.create()[0]
    return cloud.create(flavor=PINNED, group=cloud.group("anti-affinity"))[0]


@dataclass
class Trial:
    """A cloud just before a workflow is asked for."""

    cloud: Cloud
    scenario: Scenario
    server: str = ""
    hits: list[tuple[str, ...]] = field(default_factory=list)

    def begin(self) -> None:
        if self.scenario.ask == "create":
            self.server = create(self.cloud, self.scenario)
        else:
            ask(self.cloud, self.server, self.scenario.ask)

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

    def has_ended(self) -> None:
        """The server, its domains and its images are as the scenario says."""
        self.is_right(self.scenario.ends, self.scenario.domains, self.scenario.images)

    def is_right(self, ends: str, domains: int, images: int = 0) -> None:
        server = self.cloud.show(self.server)
        assert (server.vm_state, server.task_state, server.action) == (ends, None, None), server.fault
        assert len(self.cloud.domains(self.server)) == domains
        assert len(self.cloud.images.records) == images
        assert all(record["data"] is not None for record in self.cloud.images.records.values())
        assert self.cloud.findings() == []


def trial_of(cloud: Cloud, workflow: str) -> Trial:
    scenario = SCENARIOS[workflow]
    cloud.round()
    trial = Trial(cloud, scenario)
    if scenario.ask != "create":
        trial.server = create(cloud, scenario)
        cloud.settle()
        for host in cloud.hosts.values():
            for guest in host.driver.guests.values():
                guest.has_agent = True
        for wanted in scenario.before:
            ask(cloud, trial.server, wanted)
            cloud.settle()
    cloud.sent.clear()
    return trial
