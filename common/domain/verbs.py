# SPDX-License-Identifier: Apache-2.0
"""The verbs of hosts: the commands that a conductor sends to an agent, and their results.

Each verb is one class. The fields are the arguments, the class attributes define how the agent runs
the verb and which images it may open, and ``Result`` is the type of its result. Conductors and
agents share these classes. A missing or mis-spelt field fails in mypy, and ``decode`` names the
field of a message that lacks it.

To add a verb, add its class here, a case to ``compute_agent.verbs.carry_out`` and a step to a
workflow. See docs/how-to-add.md.

Invariant: no field of a verb has a default, so that a mis-spelt field is a missing field. A field
that a later release adds gets a default, because agents of two releases run side by side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

from common.domain.command_key import CommandKey, CommandKind
from common.domain.json_types import JsonObject
from common.domain.models import (
    AttachedShare,
    AttachedVolume,
    Belongings,
    Command,
    Control,
    GuestSpec,
    ImageRef,
    Interface,
    Result,
)
from common.domain.wire import from_wire, to_wire


# --- results ---
@dataclass(frozen=True, kw_only=True)
class GuestState:
    """The state of the guest after the verb."""

    #: As the Compute API numbers power states. None if the host reports no guest.
    power_state: int | None = None


@dataclass(frozen=True, kw_only=True)
class NoResult:
    """The verb returns nothing."""


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """The image that the verb wrote."""

    size: int  #: bytes


@dataclass(frozen=True, kw_only=True)
class CopiedFiles:
    """The files that the verb offered or copied."""

    bytes: int  #: of data, without holes


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """A live migration that has ended."""

    bytes: int  #: sent to the destination
    job_seconds: float


@dataclass(frozen=True, kw_only=True)
class Destination:
    """How a host receives a running guest.

    Only drivers read the details: the source's driver gets the result of the destination's driver.
    """

    details: JsonObject


@dataclass(frozen=True, kw_only=True)
class Controlled:
    """The outcome of a control."""

    in_hand: bool  #: True if the host runs this live migration


# --- verbs ---
#: Name on the wire, in logs and in metrics -> verb. Each class adds itself.
VERBS: dict[str, type[Verb]] = {}


@dataclass(frozen=True, kw_only=True)
class Verb:
    """The arguments of a verb. Subclasses add the fields."""

    #: The class's name in snake case.
    name: ClassVar[str]
    #: The type of the result.
    Result: ClassVar[type] = GuestState
    #: May start a guest. The host must have had a lease since the command was sent, and waits
    #: until every guest that must not run there is off.
    starts_guest: ClassVar[bool] = False
    #: Needs the same lease although it starts no guest.
    needs_lease: ClassVar[bool] = False
    #: Is journalled before it begins and is never repeated, because its effect cannot be checked.
    #: After a crash its result is "unknown".
    runs_once: ClassVar[bool] = False
    #: Is repeated until it succeeds. No failure is definite, and none is reported.
    retries_until_done: ClassVar[bool] = False
    #: Its result decides which of two hosts has the guest. Only ``VerbFailed`` is a failure, any
    #: other exception is retried.
    is_authoritative: ClassVar[bool] = False
    #: Makes disks from an image. A limited number run at a time.
    builds: ClassVar[bool] = False
    #: Copies whole disks, which takes minutes and loads the host's disk and network. One worker
    #: stays free of these verbs.
    copies_disks: ClassVar[bool] = False
    #: Migrates a running guest to another host. A limited number run at a time. The verb is
    #: journalled when it begins. An abort before that ends it at once.
    migrates: ClassVar[bool] = False
    #: Mostly waits for the guest, so it occupies no worker.
    waits_for_guest: ClassVar[bool] = False

    def __init_subclass__(cls, *, is_abstract: bool = False) -> None:
        if not is_abstract:
            cls.name = re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower()
            VERBS[cls.name] = cls

    @property
    def image_to_read(self) -> str | None:
        """The id of the image that the verb may read, or None."""
        return None

    @property
    def image_to_write(self) -> str | None:
        """The id of the image that the verb writes, or None."""
        return None


@dataclass(frozen=True, kw_only=True)
class GuestVerb(Verb, is_abstract=True):
    """A verb with the description of the guest."""

    guest: GuestSpec


@dataclass(frozen=True, kw_only=True)
class ImageVerb(GuestVerb, is_abstract=True):
    """A verb that may read the image of the guest's disk."""

    @property
    def image_to_read(self) -> str | None:
        """The id of the guest's image. None or "" without an image, or if a volume is the root."""
        return self.guest.image.id if self.guest.image else None


@dataclass(frozen=True, kw_only=True)
class VolumeVerb(Verb, is_abstract=True):
    """A verb about one volume of the guest."""

    volume: AttachedVolume


@dataclass(frozen=True, kw_only=True)
class EnsureGuest(ImageVerb):
    """Create and start the guest."""

    starts_guest = True
    builds = True
    copies_disks = True


@dataclass(frozen=True, kw_only=True)
class EnsureRunning(Verb):
    """Start or resume the guest.

    A guest that is off first loses the volumes and shares that are not in ``has``, and gets the
    missing volumes of ``has.needed``.
    """

    starts_guest = True
    has: Belongings


@dataclass(frozen=True, kw_only=True)
class EnsureStopped(Verb):
    """Shut the guest down, and power it off after the timeout."""

    waits_for_guest = True
    timeout: float  #: seconds that the guest has to shut down, 0 powers it off at once


@dataclass(frozen=True, kw_only=True)
class Reboot(Verb):
    """Shut the guest down as ``EnsureStopped`` does, and start it as ``EnsureRunning`` does."""

    starts_guest = True
    waits_for_guest = True
    timeout: float  #: as in ``EnsureStopped``
    has: Belongings


@dataclass(frozen=True, kw_only=True)
class EnsurePaused(Verb):
    """Stop the guest's CPUs."""


@dataclass(frozen=True, kw_only=True)
class EnsureSuspended(Verb):
    """Save the guest's memory to disk and stop the guest."""


@dataclass(frozen=True, kw_only=True)
class Rebuild(ImageVerb):
    """Replace the guest's disks by new ones from the image."""

    starts_guest = True
    builds = True
    copies_disks = True
    runs: bool  #: start the guest afterwards
    keep_ephemeral: bool  #: keep the ephemeral disks


@dataclass(frozen=True, kw_only=True)
class Rescue(GuestVerb):
    """Boot the guest from a disk made of another image."""

    starts_guest = True
    builds = True
    copies_disks = True
    image: ImageRef

    @property
    def image_to_read(self) -> str | None:
        """The id of the image to boot from."""
        return self.image.id


@dataclass(frozen=True, kw_only=True)
class Unrescue(GuestVerb):
    """Boot the guest from its own disk again."""

    starts_guest = True


@dataclass(frozen=True, kw_only=True)
class AttachInterface(Verb):
    """Attach an interface to the guest."""

    interface: Interface


@dataclass(frozen=True, kw_only=True)
class DetachInterface(Verb):
    """Detach an interface from the guest."""

    interface: Interface


@dataclass(frozen=True, kw_only=True)
class AttachShare(Verb):
    """Give a share to the guest, which is off."""

    share: AttachedShare


@dataclass(frozen=True, kw_only=True)
class DetachShare(Verb):
    """Remove a share from the guest, which is off."""

    Result = NoResult
    share: AttachedShare


@dataclass(frozen=True, kw_only=True)
class AttachVolume(VolumeVerb):
    """Connect a volume to the host and attach it to the guest."""


@dataclass(frozen=True, kw_only=True)
class DetachVolume(VolumeVerb):
    """Detach a volume from the guest and disconnect it from the host."""

    waits_for_guest = True


@dataclass(frozen=True, kw_only=True)
class DisconnectVolumes(Verb):
    """Disconnect all volumes of the guest, which is off, from the host."""

    Result = NoResult


@dataclass(frozen=True, kw_only=True)
class ExtendVolume(VolumeVerb):
    """Show the guest the new size of a volume."""

    Result = NoResult


@dataclass(frozen=True, kw_only=True)
class CopyVolume(VolumeVerb):
    """Copy the guest's volume to the connection in ``volume``, and mirror further writes there."""

    copies_disks = True
    waits_for_guest = True


@dataclass(frozen=True, kw_only=True)
class SwitchVolume(VolumeVerb):
    """After ``CopyVolume``: let the guest use the copy only."""

    waits_for_guest = True
    retries_until_done = True


@dataclass(frozen=True, kw_only=True)
class KeepVolume(VolumeVerb):
    """Instead of ``SwitchVolume``: let the guest use the old volume only."""

    retries_until_done = True


@dataclass(frozen=True, kw_only=True)
class SnapshotVolume(VolumeVerb):
    """Let the guest continue in the new file that ``volume`` names."""

    #: The guest's agent freezes the file systems.
    waits_for_guest = True


@dataclass(frozen=True, kw_only=True)
class MergeVolume(VolumeVerb):
    """Merge files of a volume, because the snapshot that created them is deleted."""

    copies_disks = True
    waits_for_guest = True
    #: As in ``compute_agent.virt.driver.VolumeMerge``.
    file: str | None
    into: str | None


@dataclass(frozen=True, kw_only=True)
class Snapshot(Verb):
    """Copy the guest's disk into an image."""

    Result = StoredImage
    copies_disks = True
    image_id: str

    @property
    def image_to_write(self) -> str | None:
        """The id of the image to write."""
        return self.image_id


@dataclass(frozen=True, kw_only=True)
class InjectNmi(Verb):
    """Interrupt the guest, so that its kernel dumps."""

    Result = NoResult
    runs_once = True


@dataclass(frozen=True, kw_only=True)
class SetPassword(Verb):
    """Set a password inside the guest."""

    Result = NoResult
    runs_once = True
    waits_for_guest = True
    user: str
    admin_pass: str


@dataclass(frozen=True, kw_only=True)
class EnsureAbsent(Verb):
    """Delete the guest and its files."""

    Result = NoResult
    retries_until_done = True
    keep_files: bool  #: because another host uses them on shared storage


@dataclass(frozen=True, kw_only=True)
class Offer(Verb):
    """Let a host with the secret read the guest's files."""

    Result = CopiedFiles
    secret: str


@dataclass(frozen=True, kw_only=True)
class Prepare(ImageVerb):
    """Check that the guest can start on this host, and fetch its backing files."""

    Result = NoResult
    needs_lease = True
    copies_disks = True
    source: str | None  #: address of the source's transfer service, None on shared storage
    secret: str  #: as in ``Offer``


@dataclass(frozen=True, kw_only=True)
class Receive(ImageVerb):
    """Copy the guest's files from the source."""

    Result = CopiedFiles
    needs_lease = True
    copies_disks = True
    source: str | None  #: as in ``Prepare``
    secret: str  #: as in ``Offer``


@dataclass(frozen=True, kw_only=True)
class Install(GuestVerb):
    """Define the guest with the files on this host."""

    starts_guest = True
    runs: bool  #: start the guest


@dataclass(frozen=True, kw_only=True)
class ResizeHere(GuestVerb):
    """Resize the guest, which is off, and keep the old disks."""

    starts_guest = True
    copies_disks = True
    runs: bool  #: start the guest


@dataclass(frozen=True, kw_only=True)
class SettleResize(GuestVerb):
    """After ``ResizeHere``: drop the old disks or restore them."""

    needs_lease = True
    back: bool  #: restore
    resized: int  #: fence of the ``ResizeHere``


@dataclass(frozen=True, kw_only=True)
class PrepareArrival(ImageVerb):
    """Check that the guest can migrate to this host while it runs, and prepare the arrival."""

    Result = Destination
    needs_lease = True
    copies_disks = True
    source: str  #: address of the source's transfer service
    secret: str  #: as in ``Offer``
    shared: bool  #: both hosts have the guest's files
    cpu: JsonObject  #: ``cpu_info`` of the source


@dataclass(frozen=True, kw_only=True)
class LiveMigrate(GuestVerb):
    """Migrate the guest to another host while it runs."""

    Result = Migrated
    starts_guest = True
    copies_disks = True
    migrates = True
    is_authoritative = True
    to: Destination
    shared: bool  #: both hosts have the guest's files


@dataclass(frozen=True, kw_only=True)
class Arrived(GuestVerb):
    """Define the guest that ``LiveMigrate`` has started on this host."""

    is_authoritative = True


@dataclass(frozen=True, kw_only=True)
class ControlMigration(Verb):
    """Abort or complete a live migration that runs on this host."""

    Result = Controlled
    migration: CommandKey  #: of the command with ``LiveMigrate``
    control: Control


#: Names of the verbs that copy whole disks.
COPYING = frozenset(name for name, verb in VERBS.items() if verb.copies_disks)


# --- commands ---
class UnknownVerb(ValueError):
    """This release has no such verb."""


def encode(
    verb: Verb,
    key: CommandKey,
    *,
    server: str,
    fence: int,
    session: int = 0,
    request_id: str = "",
) -> Command:
    """Return the verb as a command for a host. The command is not sent.

    Args:
        verb: The verb with its arguments.
        key: Identifies the command.
        server: Id of the server.
        fence: The fence of the server. The host refuses a fence older than the newest.
        session: The session of the host. 0 is a placeholder, which the conductor replaces before it
            sends the command.
        request_id: Id of the API request that began the action, for the log.
    """
    return Command(key, server, fence, session, verb.name, to_wire(verb), request_id)


def decode(command: Command) -> Verb:
    """Return the verb of a command.

    Raises:
        UnknownVerb: This release has no verb of that name.
        TypeError, ValueError: An argument is missing, or a record or enumeration in an argument
            cannot be read.
    """
    verb = VERBS.get(command.verb)
    if verb is None:
        raise UnknownVerb(command.verb)
    return from_wire(verb, command.args)


def control_command(
    migration: CommandKey, control: Control, *, server: str, fence: int, session: int
) -> Command:
    """Return the command that aborts or completes a running live migration.

    ``migration`` is the key of the command with ``LiveMigrate``.
    """
    return encode(
        ControlMigration(migration=migration, control=control),
        replace(migration, kind=CommandKind.CONTROL, step=control.value),
        server=server,
        fence=fence,
        session=session,
    )


def power_state(result: Result) -> int | None:
    """Return the guest's power state after a command, or None if the result does not contain it."""
    return from_wire(GuestState, result.data).power_state
