# SPDX-License-Identifier: Apache-2.0
"""The states, phases and statuses that the database stores as text.

``common.domain.states`` has the states of a server. A value is the text of its column, and of the
API where the API shows it.
"""

from __future__ import annotations

from enum import StrEnum

#: The status that the network service gives to a wired port, and to a binding that is in force.
PORT_ACTIVE = "ACTIVE"


class ActionState(StrEnum):
    """The progress of an action."""

    DUE = "due"  #: a conductor continues the action from ``due_at`` on
    WAITING = "waiting"  #: the action's command is at a host
    STUCK = "stuck"  #: an operator has to continue the action
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"  #: a later action took the server


class ActionPhase(StrEnum):
    """The direction in which an action goes through the steps of its workflow."""

    FORWARD = "do"
    UNDO = "undo"


class StepEvent(StrEnum):
    """An event of a step in the journal of an action."""

    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNDONE = "undone"
    UNDO_FAILED = "undo_failed"
    STUCK = "stuck"  #: the conductor gave up after repeated errors


class ResultStatus(StrEnum):
    """How a command ended at its host."""

    DONE = "done"
    FAILED = "failed"  #: nothing of the command runs any longer
    UNKNOWN = "unknown"  #: a crash interrupted a verb that the agent must not repeat
    DEAD = "dead"  #: the host's guests are dead, as only conductors report
    #: The agent did not begin the command: the fence is old, or the agent lacks the verb.
    REFUSED = "refused"


class GuestState(StrEnum):
    """The state in which the control plane wants a guest to be on a host."""

    RUNNING = "running"
    STOPPED = "stopped"
    ABSENT = "absent"  #: the host still has to remove the guest
    KEPT = "kept"  #: off, on a host to which the server may return
    ARRIVING = "arriving"  #: in preparation on the destination of a move


class MigrationType(StrEnum):
    """The kind of a migration, as the API shows it."""

    RESIZE = "resize"
    COLD = "migration"
    LIVE = "live-migration"
    EVACUATION = "evacuation"


class MigrationStatus(StrEnum):
    """The progress of a migration, as the API shows it."""

    ACCEPTED = "accepted"
    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    PRE_MIGRATING = "pre-migrating"
    MIGRATING = "migrating"
    POST_MIGRATING = "post-migrating"
    FINISHED = "finished"  #: the server has moved, and its owner confirms or reverts the move
    CONFIRMING = "confirming"
    CONFIRMED = "confirmed"
    REVERTING = "reverting"
    REVERTED = "reverted"
    DONE = "done"  #: an evacuated server runs, and its source still has to remove the old guest
    COMPLETED = "completed"
    FAILED = "failed"
    ERROR = "error"
    CANCELLED = "cancelled"


#: A migration that has not moved its server yet, or that a user confirms or reverts.
MIGRATIONS_IN_PROGRESS = (
    MigrationStatus.ACCEPTED,
    MigrationStatus.PREPARING,
    MigrationStatus.QUEUED,
    MigrationStatus.RUNNING,
    MigrationStatus.PRE_MIGRATING,
    MigrationStatus.MIGRATING,
    MigrationStatus.POST_MIGRATING,
    MigrationStatus.CONFIRMING,
    MigrationStatus.REVERTING,
)
#: A migration that has not ended: in progress, or waiting for a confirm or a revert.
OPEN_MIGRATIONS = (*MIGRATIONS_IN_PROGRESS, MigrationStatus.FINISHED)


class BlockDeviceStatus(StrEnum):
    """The progress of the attachment of a volume to a server."""

    CREATING = "creating"  #: the volume does not exist yet
    RESERVED = "reserved"  #: the attachment names no host yet
    ATTACHING = "attaching"
    ATTACHED = "attached"
    DETACHING = "detaching"
    ERROR = "error"  #: an operator has to look


class ShareStatus(StrEnum):
    """The progress of the attachment of a share to a server."""

    ATTACHING = "attaching"
    INACTIVE = "inactive"  #: the server's host may mount the share
    DETACHING = "detaching"
    ERROR = "error"


class HostState(StrEnum):
    """Whether a host's agent reports, as the API and the operator's command show it."""

    UP = "up"
    DOWN = "down"
    #: the agent is silent, and the conductors have not declared the host down; the operator's
    #: command alone shows this
    UNKNOWN = "unknown"
    FORCED_DOWN = "forced down"  #: an admin declared the host dead
