# SPDX-License-Identifier: Apache-2.0
"""The scenarios: for each workflow the preparation, the request, and the expected end.

A ``Trial`` runs a scenario on a simulated cloud, with a crash at any fault point.
"""

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
    """A workflow on a server: preparation, request, and the expected end or failure."""

    #: The request: "key" or "key:VALUE" of the action.
    ask: str
    #: The vm_state after a success.
    ends: str
    #: Number of domains of the server after a success.
    domains: int = 1
    #: Number of images in the image service after a success.
    images: int = 0
    #: The requests before this one, or KILL.
    before: tuple[str, ...] = ()
    #: The vm_state, and the numbers of domains and images, after a host step has failed.
    fails_as: str = states.ACTIVE
    fails_with: int = 1
    fails_images: int = 0
    #: The verbs of the workflow's host steps.
    verbs: tuple[str, ...] = ()
    #: True if a move keeps the content of the disk, None if the workflow is not a move.
    keeps: bool | None = None
    #: True for a server with dedicated CPUs in an anti-affinity group.
    placed: bool = False
    #: Name of the storage that the hosts share, or "" for local disks.
    storage: str = ""
    #: True for a cloud of one host.
    alone: bool = False
    #: False for a server without ports.
    ports: bool = True
    #: True for a variant of another scenario, which fewer tests run.
    brief: bool = False
    #: True for a server with a data volume that outlives the server.
    volumes: bool = False
    #: True for a server that also boots from a new volume, which is deleted with the server.
    boots: bool = False


#: Key of an action on a volume of the server -> the function that requests the action.
VOLUME_ACTIONS = {
    "detach_volume": volume_service.detach,
    "extend_volume": volume_service.extend,
    "swap_volume": volume_service.swap,
    "volume_snapshot_create": volume_service.take_snapshot,
    "volume_snapshot_delete": volume_service.merge_snapshot,
}
#: A request in ``before``: the server's host loses power, and is forced down.
KILL = "kill"
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
#: Variants with more constraints on placement, without ports, and with shared storage.
SCENARIOS |= {
    f"{name}:placed": replace(SCENARIOS[name], placed=True)
    for name in ("create", "unshelve", "delete")
} | {
    f"{name}:{variant}": replace(SCENARIOS[name], brief=True, **changes)
    for variant, names, changes in (
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
#: Variants for servers with volumes.
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

#: Key of an action -> the arguments that the API stores.
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


def ask(cloud: Cloud, server: str, request: str) -> None:
    """Request an action as the API does, or kill the server's host.

    Args:
        cloud: The cloud.
        server: The server's id.
        request: "key" or "key:VALUE" of the action, or KILL.
    """
    key, _, value = request.partition(":")
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
    if key in VOLUME_ACTIONS:
        volume = next(iter(volume_service.of(cloud, server)), ids.new())
        VOLUME_ACTIONS[key](cloud, server, volume)
        return
    if key == "createImage" and volume_service.is_volume_backed(cloud, server):
        volumes = volume_service.of(cloud, server)
        snapshots = [cloud.volumes.make_snapshot(volume) for volume in volumes]
        args = {**(args or {}), "snapshots": snapshots}
    if key == "rebuild" and volume_service.is_volume_backed(cloud, server):
        args = {"before": {"image": cloud.show(server).image}, "reimage": NEW_IMAGE}
    if key == "detach_interface":
        ports = (interface["port"] for interface in cloud.show(server).interfaces)
        args = {"port": next(ports, ids.new())}
    cloud.ask(server, key, value or None, args, SECRETS.get(key))


def bigger(cloud: Cloud, server: str) -> Flavor:
    """Return a flavor with more vCPUs, memory and disk than the server's."""
    old = from_wire(Flavor, cloud.show(server).flavor)
    return replace(
        old, id="2", name="m1.bigger", vcpus=2, memory_mb=2 * old.memory_mb, root_gb=old.root_gb + 1
    )


def create(cloud: Cloud, scenario: Scenario) -> str:
    """Create the scenario's server and return the id."""
    networks = None if scenario.ports else []
    # A move always begins on the same host.
    placement = {"host": "h1"} if scenario.keeps is not None else {}
    if scenario.volumes:
        volumes = [cloud.volumes.build_wanted_volume(cloud.volumes.make(size_gb=2))]
        if scenario.boots:
            root_volume = cloud.volumes.make(looks=2)
            more = {"boot_index": 0, "status": "creating", "source_type": "image"}
            values = {"delete_on_termination": True, "more": more}
            volumes.append(cloud.volumes.build_wanted_volume(root_volume, **values))
        return cloud.create(networks=networks, volumes=volumes, **placement)[0]
    if not scenario.placed:
        return cloud.create(networks=networks, **placement)[0]
    return cloud.create(
        networks=networks, flavor=PINNED, group=cloud.group("anti-affinity"), **placement
    )[0]


#: vm_states in which a guest runs.
RUNS = (states.ACTIVE, states.RESCUED)


@dataclass
class Trial:
    """A cloud just before the request of a scenario."""

    cloud: Cloud
    scenario: Scenario
    #: The server's id. "" if the workflow creates the server.
    server: str = ""
    #: The server's row before the request.
    was: Any = None
    #: The fault points that were reached: process, workflow or verb, step, and place.
    hits: list[tuple[str, ...]] = field(default_factory=list)

    def begin(self) -> None:
        """Request the scenario's action, or create the server."""
        if self.scenario.ask == "create":
            self.server = create(self.cloud, self.scenario)
        else:
            ask(self.cloud, self.server, self.scenario.ask)

    def crash_at(self, number: int) -> None:
        """Kill the process that reaches the fault point with this number, counted from 0.

        -1 only records the points in ``hits``.
        """

        def conductor(workflow: str, step: str, where: str) -> None:
            self._record_hit(("conductor", workflow, step, where), number)

        def agent(verb: str, step: str, where: str) -> None:
            self._record_hit(("agent", verb, step, where), number)

        self.cloud.engine.fault_point = conductor
        for host in self.cloud.hosts.values():
            host.fault_point = agent

    def _record_hit(self, point: tuple[str, ...], number: int) -> None:
        if point[1] == "sweep":
            return
        self.hits.append(point)
        if len(self.hits) - 1 == number:
            raise Crash(point)

    def run_through_crashes(self) -> None:
        """Settle, and restart the agents or the conductor after a crash of either."""
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

    def check_expected_end(self) -> None:
        """Check that the trial has ended as the scenario describes a success."""
        self.check_end(self.scenario.ends, self.scenario.domains, self.scenario.images)

    def check_end(self, ends: str, domains: int, images: int = 0) -> None:
        """Power on all hosts, and check the server, its guest and the external services.

        Args:
            ends: The expected vm_state of the server.
            domains: The expected number of domains of the server.
            images: The expected number of images in the image service.
        """
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
        self._check_shares()
        self._check_volumes()
        snapshots = self.cloud.volumes.state.snapshots
        assert not snapshots or images, "snapshots that no image names"
        assert not self.cloud.volumes.list_awaited(), "snapshots that the service waits for"
        # A scripted failure comes before any effect.
        if domains and server.host and ends != states.ERROR:
            guest = self.cloud.hosts[server.host].driver.host.guests[self.server]
            should_run = (
                self.was.power_state == states.RUNNING if ends == states.RESIZED else ends in RUNS
            )
            is_running = guest.power_state == states.RUNNING
            assert ends == states.ERROR or is_running == should_run, (guest, server)
            if self.scenario.keeps is not None:
                is_rebuilt = not self.scenario.keeps and server.host != self.was.host
                assert guest.disk == ({} if is_rebuilt else {"canary": "alive"})
                sizes = (server.flavor["vcpus"], server.flavor["memory_mb"])
                assert (guest.vcpus, guest.memory_mb) == sizes
                ports = self.cloud.networks.held.values()
                assert {port["binding:host_id"] for port in ports} <= {server.host}

    def _check_shares(self) -> None:
        """Check that the service allows exactly the attached shares, and that the guest has them.

        A guest that is off on a host that was down may still have a detached share. Then the guest
        must lose the share at the next start.
        """
        shares = self.cloud.shares_of(self.server)
        assert self.cloud.show(self.server).shares == len(shares)
        attached = {share for share, status in shares.items() if status == "inactive"}
        assert set(shares.values()) <= {"inactive", "error"}
        assert {share for share, _ in self.cloud.shares.rules} == attached
        for host in self.cloud.domains(self.server):
            guest = self.cloud.hosts[host].driver.host.guests[self.server]
            if not guest.is_active and {share.share_id for share in guest.shares} - set(shares):
                for power in ("os-start", "os-stop"):
                    self.cloud.ask(self.server, power)
                    self.cloud.settle()
                    assert guest.is_active == (power == "os-start")
            assert attached <= {share.share_id for share in guest.shares} <= set(shares)

    def _check_volumes(self) -> None:
        """Check that the service has one attachment for each volume of the server, and no other.

        The volumes must be connected on the server's host only.
        """
        volumes, server = volume_service.of(self.cloud, self.server), self.cloud.show(self.server)
        assert server.volumes == len(volumes)
        status = "attached" if server.host else "reserved"
        assert set(volumes.values()) <= {status}, volumes
        attachments = self.cloud.volumes.state.held.values()
        assert sorted(held.attachment.volume_id for held in attachments) == sorted(volumes)
        for volume in self.cloud.volumes.state.volumes:
            hosts = {server.host} if volume in volumes and server.host else set()
            assert self.cloud.volumes.hosts_of(volume) == hosts
        for name, host in self.cloud.hosts.items():
            guest = host.driver.host.guests.get(self.server)
            connected = set(guest.connected) if guest is not None else set()
            assert connected == (set(volumes) if name == server.host else set()), name
            if guest is not None and guest.is_active:
                assert {volume.volume_id for volume in guest.volumes} == set(volumes), name

    def check_unchanged(self) -> None:
        """Check that the server's row shows users the same as before the request."""
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
    """Check that the doctor has no finding on the records, and no server runs on two hosts."""
    findings = cloud.store.read(doctor.check)
    assert findings == [], findings
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
    """Checks a cloud after each round, as ``Cloud.watcher``.

    A full check (``look``) follows a round that changed more than heartbeats. A few findings depend
    on the time, so a full check also runs every ``SECONDS``. A copy of a cloud begins with one.
    """

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
    """Check the cloud after each round from now on."""
    cloud.watcher = Watcher(cloud)


def prepare(cloud: Cloud, workflow: str) -> Trial:
    """Prepare the cloud for the scenario with this name, without copies."""
    return _prepare(cloud, SCENARIOS[workflow], _lead_up)


def prepare_new(cloud: Cloud, workflow: str) -> Trial:
    """Prepare a new cloud, with copies of the parts that earlier scenarios have in common."""
    return _prepare(cloud, SCENARIOS[workflow], _lead_up_by_copies)


LeadUp = Callable[[Cloud, Scenario], str]


def _prepare(cloud: Cloud, scenario: Scenario, lead_up: LeadUp) -> Trial:
    server = lead_up(cloud, scenario)
    cloud.sent.clear()
    return Trial(cloud, scenario, server, cloud.show(server) if server else None)


def _lead_up(cloud: Cloud, scenario: Scenario) -> str:
    """Register the hosts, build the scenario's server and complete the requests of ``before``.

    Returns:
        The server's id, or "" if the workflow creates the server.
    """
    _register(cloud, scenario)
    if scenario.ask == "create":
        return ""
    server = _build(cloud, scenario)
    for request in scenario.before:
        _ask_and_settle(cloud, server, request)
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
    """Do the same as ``_lead_up``, but each part only once in a process.

    Later scenarios that begin with the same parts get copies.
    """
    is_move = scenario.keeps is not None
    key = (scenario.storage, scenario.alone, is_move)
    _do_or_copy(cloud, key, lambda: _register(cloud, scenario))
    if scenario.ask == "create":
        return ""
    key = (*key, scenario.ports, scenario.placed, scenario.volumes, scenario.boots)
    server: str = _do_or_copy(cloud, key, lambda: _build(cloud, scenario))
    for request in scenario.before:
        key = (*key, request)
        _do_or_copy(cloud, key, partial(_ask_and_settle, cloud, server, request))
    return server


def _ask_and_settle(cloud: Cloud, server: str, request: str) -> None:
    ask(cloud, server, request)
    cloud.settle()


def _do_or_copy(cloud: Cloud, key: tuple[object, ...], work: Callable[[], Any]) -> Any:
    """Do the work on the cloud, or load a copy of a cloud after the same work.

    Args:
        cloud: The cloud.
        key: Identifies this work and all work on the cloud before.
        work: A function that changes the cloud.

    Returns:
        The result of the work.
    """
    if key in _PARTS:
        return _PARTS[key].pour(cloud)
    result = work()
    _PARTS[key] = Frozen(cloud, result)
    return result


def trial_of(cloud: Cloud, workflow: str) -> Trial:
    """Prepare a new cloud for the scenario with this name, and return the trial.

    A process prepares each scenario once. Later calls get a copy.
    """
    assert is_new(cloud), "a trial begins with a cloud that nobody has used or changed"
    trial: Trial = _do_or_copy(cloud, (TRIAL, workflow), lambda: prepare_new(cloud, workflow))
    return trial


#: The first part of the key of a whole trial.
TRIAL = "trial"
_PARTS: dict[tuple[object, ...], Frozen] = {}
