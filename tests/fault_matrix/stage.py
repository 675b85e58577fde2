# SPDX-License-Identifier: Apache-2.0
"""Where a cell begins: a scenario's cloud, prepared once in a process and copied, in the
circumstances in which the step is a part of the action."""

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
from tests.workflows.neighbours import ServiceDouble
from tests.workflows.scenarios import KILL, SCENARIOS, Scenario, Trial, ask, prepare_new, trial_of
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
#: Workflows whose servers get or have a volume as they are.
OF_VOLUMES = (
    "attach_volume",
    "detach_volume",
    "extend_volume",
    "swap_volume",
    "volume_snapshot_create",
    "volume_snapshot_delete",
)
#: Steps that are a part of their workflow in these circumstances only.
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
    """``scenario``: what is different about it; ``arrange``: what is done to the cloud just before
    the workflow is asked for."""

    scenario: Callable[[Scenario], Scenario] = lambda scenario: scenario
    arrange: Callable[[Trial], None] = lambda trial: None


def _wires_late(trial: Trial) -> None:
    trial.cloud.networks.wires_after = 3


def _offloads(trial: Trial) -> None:
    trial.cloud.engine.shelved_offload_time = trial.cloud.options["shelved_offload_time"] = 0


def _fences(trial: Trial) -> None:
    host = trial.cloud.show(trial.server).host
    trial.cloud.force_down(host, False)
    fencer = Fencer()
    trial.cloud.fencer = fencer  # type: ignore[attr-defined]
    trial.cloud.engine.fence_host = trial.cloud.options["fence_host"] = fencer.fence


def _asked_of(cloud: Cloud, key: str) -> ServiceDouble:
    """The service that an attach asks first."""
    found: dict[str, ServiceDouble] = {
        "attach_interface": cloud.networks,
        "attach_share": cloud.shares,
        "attach_volume": cloud.volumes,
    }
    return found[key]


def _attaches(key: str) -> Callable[[Trial], None]:
    """The service does not answer the call of an action that the delete then supersedes."""

    def arrange(trial: Trial) -> None:
        cloud = trial.cloud
        service = _asked_of(cloud, key)
        service.silent = 1
        ask(cloud, trial.server, key)
        cloud.advance()

    return arrange


def _snapshots(trial: Trial) -> None:
    """The image service does not answer the call of a snapshot that the delete then supersedes."""
    trial.cloud.images.silent = 1
    ask(trial.cloud, trial.server, "createImage")
    trial.cloud.advance()


_ALL: dict[str, Circumstance] = {
    "": Circumstance(),
    LATE_WIRES: Circumstance(arrange=_wires_late),
    OFFLOADS: Circumstance(
        lambda one: replace(one, ends=states.SHELVED_OFFLOADED, domains=0), _offloads
    ),
    FENCES: Circumstance(arrange=_fences),
    LATE: Circumstance(arrange=_attaches("attach_interface")),
    SHARED: Circumstance(lambda one: replace(one, before=("os-stop", "attach_share"))),
    LATE_SHARED: Circumstance(
        lambda one: replace(one, before=("os-stop",)), _attaches("attach_share")
    ),
    WITH_VOLUMES: Circumstance(lambda one: replace(one, volumes=True)),
    OFFLOADS_VOLUMES: Circumstance(
        lambda one: replace(one, ends=states.SHELVED_OFFLOADED, domains=0, volumes=True), _offloads
    ),
    BOOTS: Circumstance(lambda one: replace(one, volumes=True, boots=True)),
    LATE_SNAPSHOT: Circumstance(lambda one: replace(one, volumes=True, boots=True), _snapshots),
    LATE_VOLUMES: Circumstance(arrange=_attaches("attach_volume")),
    NFS: Circumstance(lambda one: replace(one, storage="nfs")),
    SHELVED: Circumstance(lambda one: replace(one, before=("shelve",))),
}
_PREPARED: dict[str, Frozen] = {}


def scenario_of(workflow: str, step: str) -> str:
    """Where a cell of this step begins: a scenario and its circumstance."""
    return f"{workflow}+{CIRCUMSTANCES.get((workflow, step), '')}"


def pour(name: str, at_begin: Callable[[Cloud], object] = lambda cloud: None) -> Trial:
    """A new cloud just before the workflow is asked for; ``at_begin``: what is done before the
    circumstances are arranged."""
    workflow, _, circumstance = name.partition("+")
    time = Time()
    cloud = Cloud(memory_store(time), time)
    if not circumstance:
        trial = trial_of(cloud, workflow)
    else:
        if name not in _PREPARED:
            SCENARIOS[name] = _ALL[circumstance].scenario(SCENARIOS[workflow])
            try:
                prepared = prepare_new(cloud, name)
            finally:
                del SCENARIOS[name]
            _PREPARED[name] = Frozen(cloud, prepared)
        trial = _PREPARED[name].pour(cloud)
    at_begin(cloud)
    _ALL[circumstance].arrange(trial)
    return trial


def begin(cloud: Cloud, owner: str) -> None:
    """A conductor of this name does the work from now on."""
    cloud.engine = cloud.conductor(owner)
    cloud.watch, cloud.host_actions = Watch(), HostActions(cloud.engine)


def restart(cloud: Cloud) -> None:
    """Kill -9 of the conductor, and start again under the same name."""
    begin(cloud, cloud.engine.owner)
    cloud.store.write(lambda tx: actions.free_leases_of(tx, cloud.engine.owner))


def ages(cloud: Cloud) -> Any:
    """What is in hand."""
    with cloud.store.engine.connect() as tx:
        return doctor.ages(tx)


def left(cloud: Cloud) -> str:
    """The same for a person."""
    found = ages(cloud)
    return f"actions {found['actions']}, debts {found['debts']}"


__all__ = ["CIRCUMSTANCES", "KILL", "Fencer", "pour", "scenario_of"]
