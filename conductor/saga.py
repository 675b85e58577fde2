# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of workflows: Step, Workflow, and Run (one action on its way).

Workflows are straight lines of steps. A step is one of two kinds: it works *here*, in the runner's
transaction (``apply``, after an optional ``propose`` outside it that must have no effect), or it is a
*command* to a host, whose result ``done`` takes in. ``undo`` is written beside it; effects on hosts are
undone by leaving a debt, so an undo never has to reach a host. A Run only collects what is to be written;
``conductor.runner`` writes it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from common import errors
from common.clock import Clock
from common.models import Command, Fitting, ImageRef, Interface, RequestSpec, Result, Selection
from common.store.allocations import Patience
from common.store.engine import Connection, Row, Store, moment, now
from common.vault import Vault
from common.wire import from_wire
from conductor.calls import one_by_one
from conductor.ha import Policy
from conductor.heartbeats import Heartbeats


class Post(Protocol):
    """Where messages go; the real one may lose any of them."""

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Ask a scheduler; raises NoAnswer."""

    def do(self, host: str, commands: list[Command]) -> None:
        """Send commands to a host."""

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        """Tell a host to fetch these ahead."""


class Images(Protocol):
    """What the conductor asks of the image service, as Kilonova's own user. Each call may be repeated.

    Each raises Unavailable when the service does not answer, and another Problem when it refuses for good.
    """

    def create(self, record: dict[str, Any]) -> None:
        """Make an image record under the id it names; one that is there already is fine."""

    def show(self, image_id: str) -> ImageRef:
        """The image as it is now."""

    def delete(self, image_id: str) -> None:
        """Remove an image; one that is gone is fine."""

    def find(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        """Images with these properties, newest first."""


class Networks(Protocol):
    """What the conductor asks of the network service, as Kilonova's own user; raises as ``Images`` does. Ports are
    dicts as the service writes them."""

    def ports(self, server: str) -> list[dict[str, Any]]:
        """The ports of a server."""

    def port(self, port_id: str) -> dict[str, Any]:
        """One port; NotFound when it is gone."""

    def create(self, ports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Make ports, all or none. Not repeatable: look first whether they are there."""

    def update(self, port_id: str, values: dict[str, Any]) -> dict[str, Any]:
        """Change a port; NotFound when it is gone."""

    def delete(self, port_id: str) -> None:
        """Remove a port; one that is gone is fine."""

    def bind_also(self, port: dict[str, Any], host: str) -> dict[str, Any] | None:
        """Bind a port (the whole of it) to this host too, inactively. The binding, with vif_type and vif_details; None
        where the service knows one host a port. NotFound when the port is gone."""

    def activate(self, port_id: str, host: str) -> None:
        """The binding to this host is the active one now; NotFound when it is gone."""

    def unbind_at(self, port_id: str, host: str) -> None:
        """Give the inactive binding to this host up; one that is gone is fine, the active one stays."""

    def names_guests(self) -> bool:
        """Does the service know ports by names, which guests resolve?"""

    def described(self, ports: Sequence[dict[str, Any]], floating: bool) -> list[Interface]:
        """These ports with what their networks and subnets say; ``floating``: also which floating IPs lead to them,
        which none does to a port that was just made."""


PATIENCE = 8                   #: tries, in about twenty seconds, after which a silent neighbour holds no cleaning up
Spread = Callable[[str, Callable[["Run"], None], Sequence["Run"]], list[Exception | None]]   #: ``calls.one_by_one``


def no_fault(action: str, step: str, where: str) -> None:
    """The fault point of ordinary operation: nothing happens."""


def no_ring(lane: str) -> None:
    """Where whoever calls ``runner.advance`` looks again anyway."""


@dataclass
class Engine:
    """What the plain functions of the conductor work with. ``owner`` names this conductor in leases; ``ring`` is
    called after a commit that left something due at once, with its lane. ``aside``: servers whose rows were found
    locked, and until when nobody tries again; ``odd_hosts``: hosts whose reports cannot be taken in with others."""

    store: Store
    clock: Clock
    post: Post
    owner: str
    batch: int = 64
    max_attempts: int = 3
    shutdown_timeout: float = 60
    host_silence: int = 30
    images: Images | None = None
    networks: Networks | None = None
    vif_plugging_timeout: int = 300
    vif_plugging_is_fatal: bool = True
    spread: Spread = one_by_one
    vault: Vault = field(default_factory=lambda: Vault(""))
    patience: Patience = Patience()
    default_zone: str = "nova"
    shelved_offload_time: int = 0
    reclaim_interval: int = 0
    resize_confirm_window: int = 0
    may_resize_here: bool = False
    fence: Callable[[str], None] | None = None      #: makes sure that a host's guests are dead; raises a Problem
    ha: Policy | None = None                        #: hosts that went down are evacuated by themselves
    leases: Mapping[str, int] = field(default_factory=dict)     #: lane -> µs, where a call takes longer than others
    aside: dict[str, float] = field(default_factory=dict)       #: until then, by our own clock in seconds
    odd_hosts: dict[str, float] = field(default_factory=dict)   #: the same
    heartbeats: Heartbeats = field(init=False)
    fault_point: Callable[[str, str, str], None] = no_fault
    ring: Callable[[str], None] = no_ring

    def __post_init__(self) -> None:
        self.heartbeats = Heartbeats(self.store, self.clock)


class StepFailed(Exception):
    """A definite failure of a step. ``str()`` is safe for the tenant; ``details`` is for the operator; ``status`` is
    that of a neighbour's refusal, for whom an answer waits."""

    def __init__(self, text: str, details: str = "", retryable: bool = False, status: int | None = None) -> None:
        super().__init__(text)
        self.details = details
        self.retryable = retryable
        self.status = status


@dataclass
class Run:
    """One action within one transaction: what is known of it, and what will be written.

    claimed: the fitting that this transaction's claim got. verdicts: of builds on hosts, for ``allocations.judge``.
    moved: what has become of the action's migration. pending: what a neighbour has still to remove, see
    ``store.cleanups``. overlooked: what a neighbour said when it refused this step, which fails nothing any more.
    """

    action: Row[Any]
    server: Row[Any]
    data: dict[str, Any]
    selection: Selection | None = None
    problem: StepFailed | None = None
    left: dict[str, Any] = field(default_factory=dict)     # by a call outside, for the transaction
    paused: bool = False
    woken: bool = False                                    # since it was taken; see ``store.actions.wake``
    head: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    commands: list[tuple[str, Command]] = field(default_factory=list)
    claimed: Fitting | None = None
    verdicts: list[tuple[str, int]] = field(default_factory=list)
    moved: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    overlooked: str = ""

    @property
    def attempt(self) -> int:
        return int(self.head.get("attempt", self.action.attempt))

    @property
    def host(self) -> str | None:
        """Where the server is, counting what this transaction is about to write."""
        host: str | None = self.changes.get("host", self.server.host)
        return host

    @property
    def fence(self) -> int:
        """The server's number, counting what this transaction is about to write."""
        return int(self.head.get("fence", self.action.fence))

    def raise_fence(self) -> None:
        """The server's place changes: whoever acts under the old number is refused from now on."""
        self.head["fence"] = self.changes["fence"] = self.fence + 1

    def set(self, **values: Any) -> None:
        """Change the server."""
        self.changes.update(values)

    def move(self, **values: Any) -> None:
        """Change the record of the move."""
        self.moved.update(values)

    @property
    def fitting(self) -> Fitting | None:
        """Which parts of its host the guest holds, counting what this transaction has claimed."""
        if "host" in self.changes:
            return self.claimed
        return from_wire(Fitting, self.server.fitting) if self.server.fitting else None

    @property
    def is_repeated(self) -> bool:
        """May this step have been tried before? Its effect outside may be there already."""
        return self.action.owner is not None or self.action.sends > 0

    @property
    def is_undoing(self) -> bool:
        """Is the action on its way back?"""
        return bool(self.head.get("phase", self.action.phase) == "undo")

    def secrets(self, engine: Engine) -> dict[str, Any]:
        """What was sealed when the action was accepted."""
        return engine.vault.open(self.action.secrets) if self.action.secrets else {}

    def due(self, step: str | None, **head: Any) -> None:
        """A conductor should go on at this step, at once."""
        self.head.update(state="due", due_at=now(), step=step, owner=None, lease_until=None, data=self.data, **head)

    def become(self, workflow: str) -> None:
        """Another story goes on from here: one that has a step of the same name."""
        self.paused = True
        self.head.update(state="due", due_at=now(), workflow=workflow, owner=None, lease_until=None, data=self.data)

    def fail(self, text: str, details: str = "", retryable: bool = False, status: int | None = None) -> None:
        """This step definitely failed."""
        self.problem = StepFailed(text, details, retryable, status)

    def remember(self, kind: str, target: str, why: str, place: str = "", **args: Any) -> None:
        """A neighbour has this still to remove, or to put right; the action goes on without it."""
        self.pending.append({"kind": kind, "target": target, "place": place, "args": args, "why": why,
                             "server_id": self.server.id, "project_id": self.server.project_id})

    @contextmanager
    def cleaning(self, kind: str, target: str, place: str = "", **args: Any) -> Iterator[None]:
        """Calls that clean up at a neighbour, after the pivot or on the way back. What it refuses, or does not answer
        for too long, is remembered as a pending cleanup."""
        try:
            yield
        except errors.Unavailable as problem:
            if self.action.sends < PATIENCE:
                raise
            self.remember(kind, target, problem.text, place, **args)
        except errors.Problem as problem:
            self.remember(kind, target, problem.text, place, **args)

    @property
    def left_undone(self) -> str | None:
        """Why this step left something to a pending cleanup; None: it did not."""
        told = dict.fromkeys([*(one["why"] for one in self.pending), self.overlooked])
        return " ".join(filter(None, told)) or None

    def again_in(self, micros: int, **data: Any) -> None:
        """Leave the step as it is and look again later; at once when something has happened meanwhile."""
        self.paused = True
        self.data.update(data)
        self.head.update(state="due", due_at=now() + (0 if self.woken else micros), owner=None, lease_until=None,
                         data=self.data)

    def note(self, step: str, event: str, host: str | None = None, message: str | None = None,
             details: str | None = None) -> None:
        """Add an event to the journal; the action is locked."""
        seq = int(self.head.get("next_seq", self.action.next_seq))
        self.head["next_seq"] = seq + 1
        self.events.append({"action_id": self.action.id, "seq": seq, "step": step, "attempt": self.attempt,
                            "event": event, "host": host, "message": message, "details": details,
                            "at": self.action.locked_at})

    def command(self, host: str, step: str, verb: str, args: dict[str, Any]) -> None:
        """Send a command when the transaction has committed; the session is filled in by the runner."""
        self.commands.append((host, Command(self.action.id, step, self.attempt, self.server.id, self.fence, 0, verb,
                                            args)))


def fault_of(tx: Connection, problem: StepFailed) -> dict[str, Any]:
    """The fault that a server in ERROR shows; its time in microseconds, as everywhere in the database."""
    return {"code": 500, "message": str(problem), "details": problem.details,
            "created": moment(tx)}


DEBT = "debt"                #: stands for the action in the key of a command that pays a debt


def debt_command(server: str, fence: int, session: int = 0, keeps_files: bool = False) -> Command:
    """The command that asks a host to pay a debt; paying is a level, so the fence is its attempt."""
    args = {"keep_files": True} if keeps_files else {}
    return Command(DEBT, server, fence, server, fence, session, "ensure_absent", args)


Apply = Callable[[Connection, Engine, Sequence[Run]], None]


@dataclass(frozen=True)
class Step:
    """One step; ``why`` says in a sentence why it stands where it stands.

    Here: ``propose(engine, runs)`` outside and without any effect, ``apply(tx, engine, runs)`` inside the transaction.
    Outside: ``outside(engine, run)`` calls a ``neighbour``; it is journalled as started before, runs in that one's lane
    (a slow neighbour delays only what needs it), beside others, can be repeated, and may call ``run.fail``; then
    ``apply``. A step's name belongs to one lane. After the pivot a refusal fails nothing: see ``endings.overlook``.
    On a host: ``command(engine, run) -> (verb, args)`` for the server's host, or the one that ``at(run)`` names,
    ``before(tx, runs)`` in the transaction that sends it, ``done(tx, run, result)`` in the one that takes the result
    in. ``abandon``: it starts no guest, so that a host that goes down meanwhile has definitely failed it;
    ``dead_is_done``: proof that the host's guests are dead is as good as its success. ``reads_source``: it needs what
    the host has that the server leaves. ``final``: its failure is not the chosen host's, and no other would help.
    ``undo(tx, engine, run)`` removes what this action made; where that needs a host or a neighbour, ``undo_command``
    and ``undo_outside`` do. ``needed(run)``: whether this action has the step at all. ``pivot``: no way back from here.
    """

    name: str
    why: str
    propose: Callable[[Engine, Sequence[Run]], None] | None = None
    apply: Apply | None = None
    command: Callable[[Engine, Run], tuple[str, dict[str, Any]]] | None = None
    before: Callable[[Connection, Sequence[Run]], None] | None = None
    done: Callable[[Connection, Run, Result], None] | None = None
    at: Callable[[Run], str | None] | None = None
    abandon: bool = False
    dead_is_done: bool = False
    reads_source: bool = False
    final: bool = False
    outside: Callable[[Engine, Run], None] | None = None
    neighbour: str = "image"
    undo: Callable[[Connection, Engine, Run], None] | None = None
    undo_command: Callable[[Engine, Run], tuple[str, dict[str, Any]]] | None = None
    undo_outside: Callable[[Engine, Run], None] | None = None
    needed: Callable[[Run], bool] | None = None
    pivot: bool = False

    def host(self, run: Run) -> str | None:
        """Where its command goes, and the one that undoes it."""
        return self.at(run) if self.at is not None else run.host


def back_as_before(tx: Connection, engine: Engine, run: Run, problem: StepFailed) -> None:
    """The usual end of a failed action: the server keeps the state it had."""


@dataclass(frozen=True)
class Workflow:
    """A story: its steps, and what its failure means for the server; ``failed`` may begin it again by ``run.due``."""

    name: str
    steps: tuple[Step, ...]
    failed: Callable[[Connection, Engine, Run, StepFailed], None] = back_as_before
    version: int = 1

    def index(self, step: str | None) -> int:
        """Where a step stands; None is the beginning.

        Raises:
            LookupError: there is no such step in this release.
        """
        for number, known in enumerate(self.steps):
            if step in (None, known.name):
                return number
        raise LookupError(f"{self.name} has no step {step} in this release")
