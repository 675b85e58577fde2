# SPDX-License-Identifier: Apache-2.0
"""The cloud with which a cell begins.

A process prepares the cloud of each scenario once and then copies it. Some steps belong to an
action only under a certain circumstance, for example a delete with snapshots in progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from common.domain import states
from common.store.servers import actions
from conductor.engine.engine import Lane
from conductor.engine.run import Run
from conductor.engine.sweep import Watch
from conductor.hosts.host_actions import HostActions
from conductor.workflows import WORKFLOWS
from deploy.operator import doctor
from tests.schemas import memory_store
from tests.workflows.frozen import Frozen
from tests.workflows.scenarios import KILL, SCENARIOS, Scenario, Trial, ask, prepare_new, trial_of
from tests.workflows.service_doubles import ServiceDouble
from tests.workflows.simulator import Cloud, Time

LATE_WIRES, OFFLOADS, FENCES, LATE, SHARED, LATE_SHARED, SHELVED = (
    "late-wires",
    "offloads",
    "fences",
    "late",
    "shared",
    "late-shared",
    "shelved",
)
WITH_VOLUMES, OFFLOADS_VOLUMES, LATE_VOLUMES = "volumes", "offloads-volumes", "late-volumes"
BOOTS, LATE_SNAPSHOT, NFS = "boots", "late-snapshot", "nfs"
#: Workflows whose servers get or have a volume in every scenario.
OF_VOLUMES = (
    "attach_volume",
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
)
#: (workflow, step) -> the circumstance without which the workflow skips the step.
CIRCUMSTANCES: dict[tuple[str, str], str] = {
    **{
        (workflow, step): LATE_WIRES
        for workflow in ("create", "unshelve", "resize", "migrate", "revert_resize", "evacuate")
        for step in ("plug", "run")
    },
    ("shelve", "offload"): OFFLOADS,
    ("shelve", "unbind"): OFFLOADS,
    ("evacuate", "fence"): FENCES,
    ("delete", "unshare"): SHARED,
    ("delete", "wait"): LATE,
    ("delete", "release"): LATE,
    ("delete", "unshare_late"): LATE_SHARED,
    ("delete", "forget"): SHELVED,
    **{
        (workflow, step.name): WITH_VOLUMES
        for workflow, story in WORKFLOWS.items()
        if workflow not in OF_VOLUMES
        for step in story.steps
        if step.lane is Lane.VOLUME or step.condition is Run.has_volumes
    },
    ("shelve", "reserve_volumes"): OFFLOADS_VOLUMES,
    ("delete", "release_volumes_late"): LATE_VOLUMES,
    ("delete", "delete_snapshots"): LATE_SNAPSHOT,
    **{("snapshot", step): BOOTS for step in ("delete_snapshots", "leave_empty")},
    **{
        ("rebuild", step): BOOTS
        for step in (
            "stop",
            "disconnect",
            "reserve_volumes",
            "reimage",
            "await_reimage",
            "connect_volumes",
        )
    },
}


class Fencer(ServiceDouble, calls=("fence",)):
    """The operator's hook that makes sure that a host is off."""

    def __init__(self) -> None:
        super().__init__("fencing hook")

    def fence(self, host: str) -> None:
        self._speak("fence", host)
        self._answer(None)


@dataclass(frozen=True)
class Circumstance:
    """Changes to a scenario.

    Attributes:
        scenario: Returns the changed scenario.
        arrange: Changes the cloud just before the workflow is requested.
    """

    scenario: Callable[[Scenario], Scenario] = lambda scenario: scenario
    arrange: Callable[[Trial], None] = lambda trial: None


def _delay_plugging(trial: Trial) -> None:
    trial.cloud.networks.wires_after = 3


def _offload_at_once(trial: Trial) -> None:
    trial.cloud.engine.shelved_offload_time = trial.cloud.options["shelved_offload_time"] = 0


def _add_fencer(trial: Trial) -> None:
    host = trial.cloud.show(trial.server).host
    trial.cloud.force_down(host, False)
    fencer = Fencer()
    trial.cloud.fencer = fencer  # type: ignore[attr-defined]
    trial.cloud.engine.fence_host = trial.cloud.options["fence_host"] = fencer.fence


def _find_service(cloud: Cloud, key: str) -> ServiceDouble:
    """Return the service that an attach calls first."""
    services: dict[str, ServiceDouble] = {
        "attach_interface": cloud.networks,
        "attach_share": cloud.shares,
        "attach_volume": cloud.volumes,
    }
    return services[key]


def _arrange_silent_attach(key: str) -> Callable[[Trial], None]:
    """Return a function that begins an attach without an answer of the service.

    The delete of the cell then supersedes the attach.
    """

    def arrange(trial: Trial) -> None:
        cloud = trial.cloud
        service = _find_service(cloud, key)
        service.silent = 1
        ask(cloud, trial.server, key)
        cloud.advance()

    return arrange


def _begin_silent_snapshot(trial: Trial) -> None:
    """Begin a snapshot that gets no answer of the image service and is superseded by the delete."""
    trial.cloud.images.silent = 1
    ask(trial.cloud, trial.server, "createImage")
    trial.cloud.advance()


_CIRCUMSTANCES: dict[str, Circumstance] = {
    "": Circumstance(),
    LATE_WIRES: Circumstance(arrange=_delay_plugging),
    OFFLOADS: Circumstance(
        lambda scenario: replace(scenario, ends=states.SHELVED_OFFLOADED, domains=0),
        _offload_at_once,
    ),
    FENCES: Circumstance(arrange=_add_fencer),
    LATE: Circumstance(arrange=_arrange_silent_attach("attach_interface")),
    SHARED: Circumstance(lambda scenario: replace(scenario, before=("os-stop", "attach_share"))),
    LATE_SHARED: Circumstance(
        lambda scenario: replace(scenario, before=("os-stop",)),
        _arrange_silent_attach("attach_share"),
    ),
    WITH_VOLUMES: Circumstance(lambda scenario: replace(scenario, volumes=True)),
    OFFLOADS_VOLUMES: Circumstance(
        lambda scenario: replace(scenario, ends=states.SHELVED_OFFLOADED, domains=0, volumes=True),
        _offload_at_once,
    ),
    BOOTS: Circumstance(lambda scenario: replace(scenario, volumes=True, boots=True)),
    LATE_SNAPSHOT: Circumstance(
        lambda scenario: replace(scenario, volumes=True, boots=True), _begin_silent_snapshot
    ),
    LATE_VOLUMES: Circumstance(arrange=_arrange_silent_attach("attach_volume")),
    NFS: Circumstance(lambda scenario: replace(scenario, storage="nfs")),
    SHELVED: Circumstance(lambda scenario: replace(scenario, before=("shelve",))),
}
_PREPARED: dict[str, Frozen] = {}


def name_scenario(workflow: str, step: str) -> str:
    """Return where the cells of a step begin, as "scenario+circumstance"."""
    return f"{workflow}+{CIRCUMSTANCES.get((workflow, step), '')}"


def pour(name: str, at_begin: Callable[[Cloud], object] = lambda cloud: None) -> Trial:
    """Return a new cloud just before the workflow is requested.

    Args:
        name: A scenario and a circumstance, see ``name_scenario``.
        at_begin: Called before the circumstance is arranged.
    """
    workflow, _, circumstance = name.partition("+")
    time = Time()
    cloud = Cloud(memory_store(time), time)
    if not circumstance:
        trial = trial_of(cloud, workflow)
    else:
        if name not in _PREPARED:
            SCENARIOS[name] = _CIRCUMSTANCES[circumstance].scenario(SCENARIOS[workflow])
            try:
                prepared = prepare_new(cloud, name)
            finally:
                del SCENARIOS[name]
            _PREPARED[name] = Frozen(cloud, prepared)
        trial = _PREPARED[name].pour(cloud)
    at_begin(cloud)
    _CIRCUMSTANCES[circumstance].arrange(trial)
    return trial


def start_conductor(cloud: Cloud, owner: str) -> None:
    """Let a new conductor of this name do all work from now on."""
    cloud.engine = cloud.conductor(owner)
    cloud.watch, cloud.host_actions = Watch(), HostActions(cloud.engine)


def restart_conductor(cloud: Cloud) -> None:
    """Kill the conductor, and start another of the same name."""
    start_conductor(cloud, cloud.engine.owner)
    cloud.store.write(lambda tx: actions.free_leases_of(tx, cloud.engine.owner))


def read_ages(cloud: Cloud) -> Any:
    """Return the unfinished actions and the pending cleanups of hosts, with their ages."""
    with cloud.store.engine.connect() as tx:
        return doctor.ages(tx)


def describe_unfinished(cloud: Cloud) -> str:
    """Return the unfinished actions and pending cleanups as text."""
    unfinished = read_ages(cloud)
    return f"actions {unfinished['actions']}, removals {unfinished['removals']}"


__all__ = ["CIRCUMSTANCES", "KILL", "Fencer", "name_scenario", "pour"]
