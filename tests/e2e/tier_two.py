# SPDX-License-Identifier: Apache-2.0
"""The cells of tier 2: a table of faults in the middle of actions of real guests.

Most cells follow from the registry of workflows. Each workflow has three cells at its pivot:
without a kill, with a killed conductor, and with a killed agent on the host of the step. The other
cells need real guests: the hand-over of a live migration, the evacuation of a dead host and its
return, and a delete during an action. test_tier_two.py runs the cells with tier_two_stage.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conductor.engine.step import AnyStep
from conductor.workflows import WORKFLOWS


class Fault(StrEnum):
    """The fault as soon as the journal contains the step.

    * KILL: signal 9 to the victim.
    * DELETE: the user deletes the server.
    * RETURN: the dead host starts again.
    """

    NONE = "nothing"
    KILL = "kill"
    DELETE = "delete"
    RETURN = "host-returns"


class Victim(StrEnum):
    """The process that is killed. "there" is the destination of a move.

    AGENT is the agent of the step's host, and GUEST the QEMU of the server.
    """

    NONE = ""
    CONDUCTOR = "conductor"
    AGENT = "agent"
    AGENT_THERE = "agent-there"
    LIBVIRTD = "libvirtd"
    LIBVIRTD_THERE = "libvirtd-there"
    GUEST = "guest"
    GUEST_THERE = "guest-there"


class Expectation(StrEnum):
    """The expected outcome of the action. test_tier_two.py lists the conditions of every cell."""

    DONE = "the action completes"
    ENDS = "the action completes, or fails and then completes when repeated"
    GONE = "the server is deleted without leftovers"


@dataclass(frozen=True)
class Cell:
    """One fault at one step of one workflow."""

    workflow: str
    step: str
    fault: Fault = Fault.NONE
    victim: Victim = Victim.NONE
    expectation: Expectation = Expectation.DONE

    @property
    def id(self) -> str:
        suffix = f"-{self.victim}" if self.victim else ""
        return f"{self.workflow}/{self.step}/{self.fault}{suffix}"


#: Name, or beginning of the names, of all objects that cells create.
NAME = "tier-two"
#: Workflow without cells -> reason.
NOT_HERE = {
    "change_password": "the lab's guests have no guest agent",
    "attach_share": "the lab has no share service",
    "detach_share": "the lab has no share service",
    "extend_volume": "a volume that is connected over NBD cannot grow",
    "volume_snapshot_create": "the lab's volume service snapshots its volumes itself",
    "volume_snapshot_delete": "the lab's volume service snapshots its volumes itself",
    "swap_volume": "only Cinder requests this, and the lab's volume service moves no volumes",
    "resize_here": "a resize in the lab always goes to another host",
    "confirm_here": "a resize in the lab always goes to another host",
    "revert_here": "a resize in the lab always goes to another host",
}
#: Workflows of shelved or deleted servers, which need a cloud that keeps such servers.
KEEPING = ("offload", "unshelve_here", "soft_delete", "restore")


def find_pivot(workflow: str) -> AnyStep:
    """Return the pivot of a workflow.

    Without a pivot, return the last command without a condition, or the last command, or the last
    step.
    """
    steps = WORKFLOWS[workflow].steps
    pivots = [step for step in steps if step.pivot]
    commands = [step for step in steps if step.command and step.condition is None]
    uploads = [step for step in steps if step.command]
    return (pivots or commands[-1:] or uploads[-1:] or list(steps[-1:]))[0]


def _kills(
    workflow: str, step: str, *victims: Victim, expectation: Expectation = Expectation.DONE
) -> list[Cell]:
    return [Cell(workflow, step, Fault.KILL, victim, expectation) for victim in victims]


def _deletes(*points: tuple[str, str]) -> list[Cell]:
    return [Cell(*point, Fault.DELETE, expectation=Expectation.GONE) for point in points]


#: A live migration before, during and after the time with a guest on both hosts.
HAND_OVER = [
    *_kills("live_migrate", "prepare", Victim.AGENT_THERE, Victim.CONDUCTOR),
    *_kills("live_migrate", "migrate", Victim.AGENT, Victim.CONDUCTOR),
    # The agent of the destination forwards the data between the two libvirtd processes.
    *_kills("live_migrate", "migrate", Victim.AGENT_THERE, expectation=Expectation.ENDS),
    *_kills(
        "live_migrate",
        "migrate",
        Victim.LIBVIRTD,
        Victim.LIBVIRTD_THERE,
        expectation=Expectation.ENDS,
    ),
    *_kills(
        "live_migrate", "migrate", Victim.GUEST, Victim.GUEST_THERE, expectation=Expectation.ENDS
    ),
    *_kills("live_migrate", "arrive", Victim.AGENT, Victim.CONDUCTOR),
    *_kills("live_migrate", "switch", Victim.AGENT_THERE, Victim.CONDUCTOR),
]
#: Evacuations of one dead host, in this order. The last cell starts the host again.
EVACUATIONS = [
    *_kills("evacuate", "fence", Victim.CONDUCTOR),
    Cell("evacuate", "leave"),
    *_kills("evacuate", "build", Victim.AGENT, Victim.CONDUCTOR),
    *_kills("evacuate", "leave", Victim.CONDUCTOR),
    *_deletes(("evacuate", "build")),
    Cell("evacuate", "build", Fault.RETURN),
]
DELETES = _deletes(
    ("create", "build"),
    ("live_migrate", "migrate"),
    ("resize", "copy"),
    ("snapshot", "upload"),
    ("shelve", "upload"),
    ("unshelve", "build"),
    ("rebuild", "rebuild"),
    ("attach_volume", "attach"),
)


def _pivots() -> dict[Victim, list[Cell]]:
    """Return a cell at each workflow's pivot, by victim.

    Only a step with a command has a cell with a killed agent.
    """
    points = {name: find_pivot(name) for name in WORKFLOWS if name not in NOT_HERE}
    pivots: dict[Victim, list[Cell]] = {
        victim: [] for victim in (Victim.AGENT, Victim.CONDUCTOR, Victim.NONE)
    }
    for name, step in points.items():
        pivots[Victim.NONE].append(Cell(name, step.name))
        for victim in (Victim.AGENT, Victim.CONDUCTOR) if step.command else (Victim.CONDUCTOR,):
            pivots[victim].append(Cell(name, step.name, Fault.KILL, victim))
    return pivots


def cells() -> list[Cell]:
    """Return all cells without duplicates, the most informative cells first.

    Among the pivots, a kill of the process that executes the step comes first.
    """
    pivots = _pivots()
    by_agents = {cell.workflow for cell in pivots[Victim.AGENT]}
    every = [
        *HAND_OVER,
        *EVACUATIONS,
        *pivots[Victim.AGENT],
        *(cell for cell in pivots[Victim.CONDUCTOR] if cell.workflow not in by_agents),
        *DELETES,
        *pivots[Victim.CONDUCTOR],
        *pivots[Victim.NONE],
    ]
    return list({cell.id: cell for cell in every}.values())
