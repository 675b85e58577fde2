# SPDX-License-Identifier: Apache-2.0
"""The cells of tier 2: faults in the middle of actions of real guests, as one table.

Most rows follow from the registry of workflows: each workflow's point of no return, with nobody
killed, with the conductor killed, and with the agent killed that carries it out. The others are
what only real guests can show: the hand-over of a live migration, the evacuation of a dead host
and its return, and a delete in the middle. test_tier_two.py runs them, tier_two_stage.py says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from conductor.engine.step import AnyStep
from conductor.workflows import WORKFLOWS


class Fault(StrEnum):
    """What happens when the step stands in the journal."""

    NOTHING = "nothing"
    KILL = "kill"  # signal 9
    DELETE = "delete"  # its user deletes the server
    RETURN = "host-returns"  # the dead host is switched on again


class Who(StrEnum):
    """Whom it happens to; "there" is the host that a server goes to."""

    NOBODY = ""
    CONDUCTOR = "conductor"
    AGENT = "agent"  # of the host that carries the step out
    AGENT_THERE = "agent-there"
    LIBVIRTD = "libvirtd"
    LIBVIRTD_THERE = "libvirtd-there"
    GUEST = "guest"  # its QEMU
    GUEST_THERE = "guest-there"


class Holds(StrEnum):
    """What must be true of the action; of every cell holds what test_tier_two.py says beside."""

    DONE = "it is done"
    ENDS = "it is done, or failed: then the server lives, and it is done when asked for again"
    GONE = "the server goes, and nothing of it stays"


@dataclass(frozen=True)
class Cell:
    """One fault at one step of one workflow."""

    workflow: str
    step: str
    fault: Fault = Fault.NOTHING
    who: Who = Who.NOBODY
    holds: Holds = Holds.DONE

    @property
    def id(self) -> str:
        victim = f"-{self.who}" if self.who else ""
        return f"{self.workflow}/{self.step}/{self.fault}{victim}"


#: Of what cells make.
NAME = "tier-two"
#: Workflows that no cell has, and why.
NOT_HERE = {
    "change_password": "the lab's guests have no guest agent",
    "attach_share": "the lab has no share service",
    "detach_share": "the lab has no share service",
    "extend_volume": "a volume that is connected over NBD cannot grow",
    "volume_snapshot_create": "the lab's volume service snapshots its volumes itself",
    "volume_snapshot_delete": "the same",
    "swap_volume": "Cinder alone asks for it, and the lab's volume service moves no volumes",
    "resize_here": "hosts of the lab do not resize in place: there is always another one",
    "confirm_here": "the same",
    "revert_here": "the same",
}
#: These want a conductor that keeps what is shelved or deleted.
KEEPING = ("offload", "unshelve_here", "soft_delete", "restore")


def point_of_no_return(workflow: str) -> AnyStep:
    """The pivot; of a workflow without one its last command that is always a part of it, or its
    last step."""
    steps = WORKFLOWS[workflow].steps
    pivots = [step for step in steps if step.pivot]
    commands = [step for step in steps if step.command and step.condition is None]
    uploads = [step for step in steps if step.command]
    return (pivots or commands[-1:] or uploads[-1:] or list(steps[-1:]))[0]


def _kills(workflow: str, step: str, *who: Who, holds: Holds = Holds.DONE) -> list[Cell]:
    return [Cell(workflow, step, Fault.KILL, one, holds) for one in who]


def _deletes(*points: tuple[str, str]) -> list[Cell]:
    return [Cell(*point, Fault.DELETE, holds=Holds.GONE) for point in points]


#: A live migration, at the moments at which its guest is here, there, or both.
HAND_OVER = [
    *_kills("live_migrate", "prepare", Who.AGENT_THERE, Who.CONDUCTOR),
    *_kills("live_migrate", "migrate", Who.AGENT, Who.CONDUCTOR),
    # The two libvirtds speak by the agent of the one that the guest goes to.
    *_kills("live_migrate", "migrate", Who.AGENT_THERE, holds=Holds.ENDS),
    *_kills("live_migrate", "migrate", Who.LIBVIRTD, Who.LIBVIRTD_THERE, holds=Holds.ENDS),
    *_kills("live_migrate", "migrate", Who.GUEST, Who.GUEST_THERE, holds=Holds.ENDS),
    *_kills("live_migrate", "arrive", Who.AGENT, Who.CONDUCTOR),
    *_kills("live_migrate", "switch", Who.AGENT_THERE, Who.CONDUCTOR),
]
#: All while one host is dead, in this order: the last has it switched on again.
EVACUATIONS = [
    *_kills("evacuate", "fence", Who.CONDUCTOR),
    Cell("evacuate", "leave"),
    *_kills("evacuate", "build", Who.AGENT, Who.CONDUCTOR),
    *_kills("evacuate", "leave", Who.CONDUCTOR),
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


def _pivots() -> dict[Who, list[Cell]]:
    """Each workflow's point of no return, by who is killed there; of an agent only where the step
    is a command, and NOBODY's are those without a kill."""
    points = {name: point_of_no_return(name) for name in WORKFLOWS if name not in NOT_HERE}
    found: dict[Who, list[Cell]] = {who: [] for who in (Who.AGENT, Who.CONDUCTOR, Who.NOBODY)}
    for name, step in points.items():
        found[Who.NOBODY].append(Cell(name, step.name))
        for who in (Who.AGENT, Who.CONDUCTOR) if step.command else (Who.CONDUCTOR,):
            found[who].append(Cell(name, step.name, Fault.KILL, who))
    return found


def cells() -> list[Cell]:
    """All of them, those that tell most first, and none twice: of the pivots first whom the kill
    strikes who carries the step out."""
    pivots = _pivots()
    by_agents = {cell.workflow for cell in pivots[Who.AGENT]}
    every = [
        *HAND_OVER,
        *EVACUATIONS,
        *pivots[Who.AGENT],
        *(cell for cell in pivots[Who.CONDUCTOR] if cell.workflow not in by_agents),
        *DELETES,
        *pivots[Who.CONDUCTOR],
        *pivots[Who.NOBODY],
    ]
    return list({cell.id: cell for cell in every}.values())
