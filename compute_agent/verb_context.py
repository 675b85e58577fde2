# SPDX-License-Identifier: Apache-2.0
"""The context of a running verb: progress, cancellation, failures and data.

Drivers and all code below a verb use this file. It imports no other part of the agent, so that the
sandbox and the transfer of files do not depend on a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from common.domain import errors
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import Control, FailureReason

#: Limits for the error text of a hypervisor or a guest agent, and for the details of a failure.
MAX_ERROR_CHARS, MAX_DETAILS_CHARS = 1000, 2000


class VerbFailed(Exception):
    """A definite failure: the verb ended, and a guest that it should start does not run.

    ``Driver`` names the exceptions, and what a failed verb may have changed.

    Attributes:
        details: Text for the operator. ``str()`` is the text for the tenant.
        retryable: True if the verb may succeed on another host. For example, a full disk is
            retryable and a hostile image is not.
        reason: Kind of failure, on which the conductor decides.
    """

    def __init__(
        self,
        text: str,
        *,
        details: str = "",
        retryable: bool = False,
        reason: FailureReason = FailureReason.UNSPECIFIED,
    ) -> None:
        super().__init__(text)
        self.details = details[:MAX_DETAILS_CHARS]
        self.retryable = retryable
        self.reason = reason


class MigrationAborted(VerbFailed):
    """A live migration ended because a user aborted it. The guest is still on the source."""

    def __init__(self) -> None:
        super().__init__("The migration was aborted.", reason=FailureReason.ABORTED)


class Cancelled(Exception):
    """The verb was cancelled: a later action has begun, or the agent ends.

    A running verb raises this within five seconds.
    """


@contextmanager
def before_guest_is_touched() -> Iterator[None]:
    """Set the reason of each VerbFailed in this block to UNTOUCHED: the guest is unchanged.

    An OSError becomes a VerbFailed with this reason. Other exceptions stay as they are.
    """
    try:
        yield
    except VerbFailed as problem:
        problem.reason = FailureReason.UNTOUCHED
        raise
    except OSError as problem:
        raise VerbFailed(
            "The host failed unexpectedly; its log says more.",
            details=f"{type(problem).__name__}: {problem}",
            reason=FailureReason.UNTOUCHED,
        ) from problem


def _no_control() -> Control | None:
    return None


def _ignore_migration(numbers: Mapping[str, int]) -> None:
    return None


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class VerbContext:
    """The calls that a running verb may make to the agent."""

    #: Reports the progress of the verb.
    report_progress: Callable[[CommandProgress], None]
    #: True when the verb must raise ``Cancelled``. A long verb checks every few seconds.
    cancelled: Callable[[], bool]
    #: The last request for the running live migration, such as an abort.
    requested_control: Callable[[], Control | None] = _no_control
    #: Reports the progress of a migration in bytes: memory_total, memory_processed,
    #: memory_remaining, and the same with disk_.
    report_migration: Callable[[Mapping[str, int]], None] = _ignore_migration
    #: True if the command is still valid and this host has held its lease without a gap since the
    #: command was sent. Then no conductor can have started the guests of this host elsewhere.
    may_start: Callable[[], bool] = _always

    def phase(self, phase: CommandPhase, percent: int | None = None) -> None:
        """Report the phase of the verb.

        Args:
            phase: The phase that begins or continues.
            percent: The part of the phase that is done, or None if unknown.
        """
        self.report_progress(CommandProgress(phase, percent))

    def require_lease(self) -> None:
        """Check, right before the CPUs of a guest start, that this host may start guests.

        Why: a long verb may outlive the lease with which it began. The conductor repeats the
        command if it is still valid.

        Raises:
            errors.Unavailable: The host's lease has lapsed or is about to, or the command is not
                valid any more.
        """
        if not self.may_start():
            raise errors.Unavailable(
                "The guest is not started: this host has no valid lease, or the command is not valid "
                "any more. The conductor repeats a valid command."
            )


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a guest that another host may read.

    Attributes:
        size: Length of the file in bytes.
        bytes: Length of the data in bytes, without holes.
    """

    name: str
    size: int
    bytes: int


class Peer(Protocol):
    """The files of a guest on another host."""

    def parts(self) -> list[Part]:
        """Return the files that the other host offers.

        Raises:
            VerbFailed: The host does not offer files, the list is not valid, or this host's TLS
                files cannot be used.
            Unavailable: The host does not answer.
        """

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, data) of a file in rising order, at most 1 MiB each. Gaps are holes.

        ``name`` is the name of the file in ``parts``. Empty data is a sign of life of the host.

        Raises:
            VerbFailed: The host does not offer the file, the data differs from the data that the
                host sent, or this host's TLS files cannot be used.
            Unavailable: The connection is lost.
        """


#: Stores the data of an image, given in chunks of at most 1 MiB. Returns when the image service
#: has stored all of it.
ImageWriter = Callable[[Iterator[bytes]], None]

#: Opens an image for reading: image id -> chunks of bytes, at most 1 MiB each.
ImageReader = Callable[[str], Iterator[bytes]]
