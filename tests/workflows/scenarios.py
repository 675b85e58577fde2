# SPDX-License-Identifier: Apache-2.0
"""How each workflow is asked for and how its server ends; used by the tests of this ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from common.domain import ids, states
from common.domain.models import Flavor
from common.domain.wire import from_wire
from deploy.operator import doctor
from tests.workflows import volumes as volume_service
from tests.workflows.frozen import Frozen, is_new
from tests.workflows.simulator import FLAVOR, Cloud, Crash


@dataclass
class Scenario:
    """How a workflow is asked for ("key" or "key:VALUE"), and how its server ends: vm_state, number
    of domains, number of images in the image service. ``before``: what was asked before, or KILL;
    ``verbs``: of its host steps;
    ``fails_as``: the vm_state when one of them fails, ``fails_with``: the domains then. ``keeps``:
    of one that moves, whether its disk is what it was.

    ``placed``: the server is in a hard group and has CPUs of its own. ``storage``: what the hosts
    share. ``alone``: its host is the only one. ``ports``: has it any? ``brief``: a variant of
    another scenario, which is not tried with everything that can happen. ``volumes``: it is created
    with one that stays; ``boots``: and boots from one that is made for it, and goes with it."""

    ask: str
    ends: str
    domains: int = 1
    images: int = 0
    before: tuple[str, ...] = ()
    fails_as: str = states.ACTIVE
    fails_with: int = 1
    fails_images: int = 0
    verbs: tuple[str, ...] = ()
    keeps: bool | None = None
    placed: bool = False
    storage: str = ""
    alone: bool = False
    ports: bool = True
    brief: bool = False
    volumes: bool = False
    boots: bool = False


#: What is done with a volume that the server has.
OF_A_VOLUME = {
    "detach_volume": volume_service.detach,
    "extend_volume": volume_service.extend,
    "swap_volume": volume_service.swap,
    "volume_snapshot_create": volume_service.take_snapshot,
    "volume_snapshot_delete": volume_service.merge_snapshot,
}
KILL = "kill"  #: its host dies, and an admin says so
SCENARIOS = {
    "create": Scenario(
        "create", states.ACTIVE, fails_as=states.ERROR, fails_with=0, verbs=("ensure_guest",)
    ),
    "stop": Scenario("os-stop", states.STOPPED, verbs=("ensure_stopped",)),
    "start": Scenario(
        "os-start",
        states.ACTIVE,
        before=("os-stop",),
        fails_as=states.STOPPED,
        verbs=("ensure_running",),
    ),
    "reboot_soft": Scenario("reboot:SOFT", states.ACTIVE, fails_as=states.ERROR, verbs=("reboot",)),
    "reboot_hard": Scenario("reboot:HARD", states.ACTIVE, fails_as=states.ERROR, verbs=("reboot",)),
    "pause": Scenario("pause", states.PAUSED, verbs=("ensure_paused",)),
    "unpause": Scenario(
        "unpause",
        states.ACTIVE,
        before=("pause",),
        fails_as=states.PAUSED,
        verbs=("ensure_running",),
    ),
    "suspend": Scenario("suspend", states.SUSPENDED, verbs=("ensure_suspended",)),
    "resume": Scenario(
        "resume",
        states.ACTIVE,
        before=("suspend",),
        fails_as=states.SUSPENDED,
        verbs=("ensure_running",),
    ),
    "crash_dump": Scenario("trigger_crash_dump", states.ACTIVE, verbs=("inject_nmi",)),
    "change_password": Scenario("changePassword", states.ACTIVE, verbs=("set_password",)),
    "rescue": Scenario("rescue", states.RESCUED, fails_as=states.ERROR, verbs=("rescue",)),
    "unrescue": Scenario(
        "unrescue", states.ACTIVE, before=("rescue",), fails_as=states.ERROR, verbs=("unrescue",)
    ),
    "rebuild": Scenario("rebuild", states.ACTIVE, fails_as=states.ERROR, verbs=("rebuild",)),
    "snapshot": Scenario("createImage", states.ACTIVE, images=1, verbs=("snapshot",)),
    "backup": Scenario("createBackup", states.ACTIVE, images=1, verbs=("snapshot",)),
    "shelve": Scenario("shelve", states.SHELVED, images=1, verbs=("snapshot",)),
    "offload": Scenario(
        "shelveOffload", states.SHELVED_OFFLOADED, domains=0, images=1, before=("shelve",)
    ),
    "unshelve": Scenario(
        "unshelve",
        states.ACTIVE,
        before=("shelve", "shelveOffload"),
        verbs=("ensure_guest",),
        fails_as=states.SHELVED_OFFLOADED,
        fails_with=0,
        fails_images=1,
    ),
    "unshelve_here": Scenario(
        "unshelve",
        states.ACTIVE,
        before=("shelve",),
        verbs=("ensure_running",),
        fails_as=states.SHELVED,
        fails_images=1,
    ),
    "soft_delete": Scenario("softDelete", states.SOFT_DELETED, verbs=("ensure_stopped",)),
    "restore": Scenario(
        "restore",
        states.ACTIVE,
        before=("softDelete",),
        verbs=("ensure_running",),
        fails_as=states.SOFT_DELETED,
    ),
    "attach_interface": Scenario("attach_interface", states.ACTIVE, verbs=("attach_interface",)),
    "detach_interface": Scenario("detach_interface", states.ACTIVE, verbs=("detach_interface",)),
    "attach_share": Scenario(
        "attach_share",
        states.STOPPED,
        before=("os-stop",),
        fails_as=states.STOPPED,
        verbs=("attach_share",),
    ),
    "detach_share": Scenario(
        "detach_share",
        states.STOPPED,
        before=("os-stop", "attach_share"),
        fails_as=states.STOPPED,
        verbs=("detach_share",),
    ),
    "attach_volume": Scenario("attach_volume", states.ACTIVE, verbs=("attach_volume",)),
    **{
        name: Scenario(name, states.ACTIVE, before=("attach_volume",), verbs=(verb,))
        for name, verb in (
            ("detach_volume", "detach_volume"),
            ("swap_volume", "copy_volume"),
            ("volume_snapshot_create", "snapshot_volume"),
            ("volume_snapshot_delete", "merge_volume"),
            ("extend_volume", "extend_volume"),
        )
    },
    "add_security_group": Scenario("addSecurityGroup", states.ACTIVE),
    "remove_security_group": Scenario(
        "removeSecurityGroup", states.ACTIVE, before=("addSecurityGroup",)
    ),
    "delete": Scenario("delete", states.DELETED, domains=0),
    "resize": Scenario(
        "resize",
        states.RESIZED,
        domains=2,
        keeps=True,
        verbs=("offer", "prepare", "ensure_stopped", "receive", "install"),
    ),
    "migrate": Scenario("migrate", states.RESIZED, domains=2, keeps=True, brief=True),
    "confirm_resize": Scenario("confirmResize", states.ACTIVE, before=("resize",), keeps=True),
    "revert_resize": Scenario(
        "revertResize",
        states.ACTIVE,
        before=("resize",),
        keeps=True,
        fails_as=states.RESIZED,
        fails_with=2,
        verbs=("ensure_stopped", "install"),
    ),
    "resize_here": Scenario(
        "resize", states.RESIZED, keeps=True, alone=True, verbs=("ensure_stopped", "resize_here")
    ),
    "confirm_here": Scenario(
        "confirmResize",
        states.ACTIVE,
        before=("resize",),
        keeps=True,
        alone=True,
        fails_as=states.RESIZED,
        verbs=("settle_resize",),
    ),
    "revert_here": Scenario(
        "revertResize",
        states.ACTIVE,
        before=("resize",),
        keeps=True,
        alone=True,
        fails_as=states.RESIZED,
        verbs=("ensure_stopped", "settle_resize"),
    ),
    "live_migrate": Scenario(
        "os-migrateLive",
        states.ACTIVE,
        keeps=True,
        verbs=("offer", "prepare_arrival", "live_migrate"),
    ),
    "evacuate": Scenario(
        "evacuate", states.ACTIVE, before=(KILL,), keeps=False, verbs=("ensure_guest",)
    ),
}
#: The same workflows, when placement has more to keep, and moves between other hosts, and of other
#: servers.
SCENARIOS |= {
    f"{name}:placed": replace(SCENARIOS[name], placed=True)
    for name in ("create", "unshelve", "delete")
} | {
    f"{name}:{what}": replace(SCENARIOS[name], brief=True, **changes)
    for what, names, changes in (
        ("placed", ("resize", "revert_resize", "live_migrate", "evacuate"), {"placed": True}),
        ("portless", ("resize", "revert_resize", "live_migrate", "evacuate"), {"ports": False}),
        (
            "shared",
            ("resize", "confirm_resize", "revert_resize", "live_migrate"),
            {"storage": "nfs"},
        ),
    )
    for name in names
}
SCENARIOS |= {
    "resize:shared": replace(
        SCENARIOS["resize:shared"], verbs=("prepare", "ensure_stopped", "receive", "install")
    ),
    "resize:stopped": replace(
        SCENARIOS["resize"],
        brief=True,
        before=("os-stop",),
        fails_as=states.STOPPED,
        verbs=("offer", "prepare", "receive", "install"),
    ),
    "confirm_resize:stopped": replace(
        SCENARIOS["confirm_resize"], brief=True, before=("os-stop", "resize"), ends=states.STOPPED
    ),
    "revert_resize:stopped": replace(
        SCENARIOS["revert_resize"], brief=True, before=("os-stop", "resize"), ends=states.STOPPED
    ),
    "live_migrate:paused": replace(
        SCENARIOS["live_migrate"],
        brief=True,
        before=("pause",),
        ends=states.PAUSED,
        fails_as=states.PAUSED,
    ),
    "evacuate:shared": replace(
        SCENARIOS["evacuate"], brief=True, storage="nfs", keeps=True, verbs=("install",)
    ),
    "evacuate:stopped": replace(
        SCENARIOS["evacuate"],
        brief=True,
        before=("os-stop", KILL),
        ends=states.STOPPED,
        fails_as=states.STOPPED,
        verbs=("rebuild",),
    ),
}
#: Servers with volumes.
SCENARIOS |= {
    f"{name}:volumes": replace(SCENARIOS[name], brief=True, volumes=True)
    for name in (
        "create",
        "delete",
        "stop",
        "rebuild",
        "rescue",
        "unrescue",
        "shelve",
        "offload",
        "unshelve",
        "resize",
        "confirm_resize",
        "revert_resize",
        "resize_here",
        "live_migrate",
        "evacuate",
    )
}
SCENARIOS |= {
    f"{name}:boots": replace(SCENARIOS[name], brief=True, volumes=True, boots=True, **changes)
    for name, changes in (
        ("create", {}),
        ("delete", {}),
        ("snapshot", {"verbs": ()}),
        ("rescue", {}),
        ("unrescue", {}),
        ("rebuild", {"verbs": ("rebuild",)}),
        ("resize", {"verbs": ("prepare", "disconnect_volumes", "receive")}),
        (
            "shelve",
            {"ends": states.SHELVED_OFFLOADED, "domains": 0, "images": 0, "verbs": ()},
        ),
        ("unshelve", {"before": ("shelve",), "fails_images": 0}),
    )
}
SCENARIOS |= {
    name: replace(SCENARIOS[name], verbs=("ensure_stopped", "disconnect_volumes"))
    for name in ("resize:volumes", "revert_resize:volumes")
}
PINNED = replace(FLAVOR, vcpus=2, extra_specs={"hw:cpu_policy": "dedicated"})

#: What the API freezes of a request, by the action's key.
ARGS: dict[str, dict[str, Any]] = {
    "createImage": {"image_id": "11111111-1111-4111-8111-111111111111", "name": "snap"},
    "createBackup": {
        "image_id": "22222222-2222-4222-8222-222222222222",
        "name": "backup",
        "backup_type": "daily",
        "rotation": 1,
    },
    "shelve": {"image_id": "33333333-3333-4333-8333-333333333333", "name": "s-shelved"},
    "attach_interface": {"networks": [{"network": "n2", "tag": "blue"}]},
    "addSecurityGroup": {"group": "g1", "name": "web"},
    "removeSecurityGroup": {"group": "g1", "name": "web"},
    "rebuild": {"before": {"image_id": None, "image": None}},
    "rescue": {"image": {"id": "44444444-4444-4444-8444-444444444444"}},
}
NEW_IMAGE = "66666666-6666-4666-8666-666666666666"
SHARE = "55555555-5555-4555-8555-555555555555"
MOVES = ("resize", "migrate", "os-migrateLive", "evacuate")
ENDINGS = ("confirmResize", "revertResize")
SECRETS = {"changePassword": {"admin_pass": "new"}, "rescue": {"admin_pass": "new"}}


def ask(cloud: Cloud, server: str, wanted: str) -> None:
    """Ask for an action as the API does."""
    key, _, value = wanted.partition(":")
    args = ARGS.get(key)
    if key == KILL:
        cloud.kill(cloud.show(server).host)
        return
    if key in MOVES:
        cloud.move(server, key, bigger(cloud, server) if key == "resize" else None)
        return
    if key in ENDINGS:
        cloud.close(server, key)
        return
    if key == "attach_share":
        cloud.attach_share(server, SHARE)
        return
    if key == "detach_share":
        cloud.detach_share(server, SHARE)
        return
    if key == "attach_volume":
        volume_service.attach(cloud, server, cloud.volumes.make())
        return
    if key in OF_A_VOLUME:
        volume = next(iter(volume_service.of(cloud, server)), ids.new())
        OF_A_VOLUME[key](cloud, server, volume)
        return
    if key == "createImage" and volume_service.boots(cloud, server):
        made = [cloud.volumes.make_snapshot(volume) for volume in volume_service.of(cloud, server)]
        args = {**(args or {}), "snapshots": made}
    if key == "rebuild" and volume_service.boots(cloud, server):
        args = {"before": {"image": cloud.show(server).image}, "reimage": NEW_IMAGE}
    if key == "detach_interface":
        args = {"port": next((one["port"] for one in cloud.show(server).interfaces), ids.new())}
    cloud.ask(server, key, value or None, args, SECRETS.get(key))


def bigger(cloud: Cloud, server: str) -> Flavor:
    """A flavor to resize it to."""
    old = from_wire(Flavor, cloud.show(server).flavor)
    return replace(
        old, id="2", name="m1.bigger", vcpus=2, memory_mb=2 * old.memory_mb, root_gb=old.root_gb + 1
    )


def create(cloud: Cloud, scenario: Scenario) -> str:
    """The scenario's server."""
    networks = None if scenario.ports else []
    where = {"host": "h1"} if scenario.keeps is not None else {}  # the same way each time
    if scenario.volumes:
        volumes = [cloud.volumes.wanted(cloud.volumes.make(size_gb=2))]
        if scenario.boots:
            made = cloud.volumes.make(looks=2)
            more = {"boot_index": 0, "status": "creating", "source_type": "image"}
            wish = {"delete_on_termination": True, "more": more}
            volumes.append(cloud.volumes.wanted(made, **wish))
        return cloud.create(networks=networks, volumes=volumes, **where)[0]
    if not scenario.placed:
        return cloud.create(networks=networks, **where)[0]
    return cloud.create(
        networks=networks, flavor=PINNED, group=cloud.group("anti-affinity"), **where
    )[0]


#: vm_states in which a guest runs.
RUNS = (states.ACTIVE, states.RESCUED)


@dataclass
class Trial:
    """A cloud just before a workflow is asked for."""

    cloud: Cloud
    scenario: Scenario
    server: str = ""
    was: Any = None
    hits: list[tuple[str, ...]] = field(default_factory=list)

    def begin(self) -> None:
        if self.scenario.ask == "create":
            self.server = create(self.cloud, self.scenario)
        else:
            ask(self.cloud, self.server, self.scenario.ask)

    def crash_at(self, number: int) -> None:
        """Kill the process that reaches the fault point with this number; -1: only write the points
        down."""

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
        for host in self.cloud.hosts.values():
            if not host.is_on:
                host.power_on()
                self.cloud.settle()
                self.cloud.force_down(host.name, False)
        server = self.cloud.show(self.server)
        assert (server.vm_state, server.task_state, server.action) == (ends, None, None), (
            server.fault
        )
        assert len(self.cloud.domains(self.server)) == domains
        assert len(self.cloud.images.records) == images
        assert all(record["data"] is not None for record in self.cloud.images.records.values())
        assert self.cloud.findings() == []
        self._has_its_shares()
        self._has_its_volumes()
        snapshots = self.cloud.volumes.state.snapshots
        assert not snapshots or images, "snapshots that no image names"
        assert not self.cloud.volumes.awaited(), "snapshots that the service waits for"
        # a scripted failure comes before any effect
        if domains and server.host and ends != states.ERROR:
            found = self.cloud.hosts[server.host].driver.host.guests[self.server]
            runs = (
                self.was.power_state == states.RUNNING if ends == states.RESIZED else ends in RUNS
            )
            story = (found, server)
            assert ends == states.ERROR or (found.power_state == states.RUNNING) == runs, story
            if self.scenario.keeps is not None:
                rebuilt = not self.scenario.keeps and server.host != self.was.host
                assert found.disk == ({} if rebuilt else {"canary": "alive"})
                sizes = (server.flavor["vcpus"], server.flavor["memory_mb"])
                assert (found.vcpus, found.memory_mb) == sizes
                assert {one["binding:host_id"] for one in self.cloud.networks.held.values()} <= {
                    server.host
                }

    def _has_its_shares(self) -> None:
        """Those that are attached may be mounted by the server's host, and no others; its guest has
        these, at the latest when it starts: one that is off on a host that was away may be
        described with more."""
        shares = self.cloud.shares_of(self.server)
        assert self.cloud.show(self.server).shares == len(shares)
        attached = {share for share, status in shares.items() if status == "inactive"}
        assert set(shares.values()) <= {"inactive", "error"}
        assert {share for share, _ in self.cloud.shares.rules} == attached
        for host in self.cloud.domains(self.server):
            guest = self.cloud.hosts[host].driver.host.guests[self.server]
            if not guest.is_active and {one.share_id for one in guest.shares} - set(shares):
                for power in ("os-start", "os-stop"):
                    self.cloud.ask(self.server, power)
                    self.cloud.settle()
                    assert guest.is_active == (power == "os-start")
            assert attached <= {one.share_id for one in guest.shares} <= set(shares)

    def _has_its_volumes(self) -> None:
        """Those that are attached are connected where the server is, by one attachment each; none
        is held that its server does not know."""
        volumes, server = volume_service.of(self.cloud, self.server), self.cloud.show(self.server)
        assert server.volumes == len(volumes)
        wanted = "attached" if server.host else "reserved"
        assert set(volumes.values()) <= {wanted}, volumes
        held = self.cloud.volumes.state.held.values()
        assert sorted(one.attachment.volume_id for one in held) == sorted(volumes)
        for volume in self.cloud.volumes.state.volumes:
            hosts = {server.host} if volume in volumes and server.host else set()
            assert self.cloud.volumes.hosts_of(volume) == hosts
        for name, host in self.cloud.hosts.items():
            guest = host.driver.host.guests.get(self.server)
            having = set(guest.connected) if guest is not None else set()
            assert having == (set(volumes) if name == server.host else set()), name
            if guest is not None and guest.is_active:
                assert {one.volume_id for one in guest.volumes} == set(volumes), name

    def is_as_before(self) -> None:
        """Nothing that its user sees of it has changed."""
        server = self.cloud.show(self.server)
        for name in (
            "host",
            "flavor",
            "vcpus",
            "memory_mb",
            "disk_gb",
            "vm_state",
            "power_state",
            "availability_zone",
            "interfaces",
        ):
            assert getattr(server, name) == getattr(self.was, name), name


def look(cloud: Cloud) -> None:
    """The records keep what they must, and no server runs on two hosts."""
    found = cloud.store.read(doctor.check)
    assert found == [], found
    check_running(cloud)


def check_running(cloud: Cloud) -> None:
    """Check that no server runs on two hosts."""
    runs = Counter(
        server
        for host in cloud.hosts.values()
        for server, guest in host.driver.host.guests.items()
        if guest.power_state != states.SHUTDOWN
    )
    assert set(runs.values()) <= {1}, f"two domains: {runs}"


@dataclass
class Watcher:
    """Look after each round that changed more than heartbeats, and every ``SECONDS``, since a few
    findings depend on the time. Copies of a cloud begin with a look."""

    SECONDS = 30.0

    cloud: Cloud
    changes: int | None = field(default=None, init=False)
    looked_at: float = field(default=0.0, init=False)

    def __call__(self) -> None:
        at, changes = self.cloud.time.monotonic(), self.cloud.changes()
        is_same = changes is not None and changes == self.changes
        if is_same and at - self.looked_at < self.SECONDS:
            check_running(self.cloud)
            return
        look(self.cloud)
        self.changes, self.looked_at = changes, at

    def __reduce__(self) -> tuple[type[Watcher], tuple[Cloud]]:
        return Watcher, (self.cloud,)


def watch(cloud: Cloud) -> None:
    """Look after each round in which something may have changed."""
    cloud.watcher = Watcher(cloud)


def prepare(cloud: Cloud, workflow: str) -> Trial:
    """The cloud is brought to where the workflow begins."""
    return _prepare(cloud, SCENARIOS[workflow], _lead_up)


def prepare_new(cloud: Cloud, workflow: str) -> Trial:
    """Do the same to a new cloud, by copies of what earlier scenarios have in common with this."""
    return _prepare(cloud, SCENARIOS[workflow], _lead_up_by_copies)


LeadUp = Callable[[Cloud, Scenario], str]


def _prepare(cloud: Cloud, scenario: Scenario, lead_up: LeadUp) -> Trial:
    server = lead_up(cloud, scenario)
    cloud.sent.clear()
    return Trial(cloud, scenario, server, cloud.show(server) if server else None)


def _lead_up(cloud: Cloud, scenario: Scenario) -> str:
    """Register the hosts, build the scenario's server and do what comes before the workflow.

    Returns:
        The server's id, or "" if the workflow creates the server.
    """
    _register(cloud, scenario)
    if scenario.ask == "create":
        return ""
    server = _build(cloud, scenario)
    for wanted in scenario.before:
        _ask_and_settle(cloud, server, wanted)
    return server


def _register(cloud: Cloud, scenario: Scenario) -> None:
    if scenario.storage or scenario.alone:
        cloud.equip(1 if scenario.alone else len(cloud.hosts), scenario.storage)
    if scenario.alone:
        cloud.engine.allow_resize_to_same_host = cloud.options["allow_resize_to_same_host"] = True
    if scenario.keeps is not None:
        watch(cloud)
    cloud.round()


def _build(cloud: Cloud, scenario: Scenario) -> str:
    server = create(cloud, scenario)
    cloud.settle()
    for host in cloud.hosts.values():
        for guest in host.driver.host.guests.values():
            guest.has_agent = True
            guest.disk["canary"] = "alive"
    return server


def _lead_up_by_copies(cloud: Cloud, scenario: Scenario) -> str:
    """Do what ``_lead_up`` does. Each part of it runs once in a process for all scenarios that
    begin with the same parts."""
    moves = scenario.keeps is not None
    key = (scenario.storage, scenario.alone, moves)
    _copied(cloud, key, lambda: _register(cloud, scenario))
    if scenario.ask == "create":
        return ""
    key = (*key, scenario.ports, scenario.placed, scenario.volumes, scenario.boots)
    server: str = _copied(cloud, key, lambda: _build(cloud, scenario))
    for wanted in scenario.before:
        key = (*key, wanted)
        _copied(cloud, key, partial(_ask_and_settle, cloud, server, wanted))
    return server


def _ask_and_settle(cloud: Cloud, server: str, wanted: str) -> None:
    ask(cloud, server, wanted)
    cloud.settle()


def _copied(cloud: Cloud, key: tuple[object, ...], work: Callable[[], Any]) -> Any:
    """Do the work on the cloud, or copy the state of a cloud on which it was done.

    Args:
        key: Names the work and all that was done on the cloud before.

    Returns:
        The result of the work.
    """
    if key in _PARTS:
        return _PARTS[key].pour(cloud)
    result = work()
    _PARTS[key] = Frozen(cloud, result)
    return result


def trial_of(cloud: Cloud, workflow: str) -> Trial:
    """The cloud, which must be new, just before the workflow is asked for. That is prepared once in
    a process: who asks for it again gets a copy."""
    assert is_new(cloud), "a trial begins with a cloud that nobody has used or changed"
    trial: Trial = _copied(cloud, (TRIAL, workflow), lambda: prepare_new(cloud, workflow))
    return trial


TRIAL = "trial"  #: begins the key of a whole trial
_PARTS: dict[tuple[object, ...], Frozen] = {}
