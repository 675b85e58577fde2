# SPDX-License-Identifier: Apache-2.0
"""The context of a running verb: its progress, its end, its failures, and the data it reads.

Used by the drivers and by all code that a verb calls. Imports nothing else of the agent, so that
the sandbox and the transfer of files do not depend on a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from common.domain import errors
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import Control, FailureReason

#: The longest error text of a hypervisor or a guest agent, and the longest details of a failure,
#: that are kept.
MAX_ERROR_CHARS, MAX_DETAILS_CHARS = 1000, 2000


class VerbFailed(Exception):
    """A definite failure: the verb did not happen and nothing of it runs.

    Attributes:
        details: a text for the operator. ``str()`` is the text for the tenant.
        retryable: True if the verb may succeed on another host. For example, a full disk is
            retryable and a hostile image is not.
        reason: the kind of failure, on which the conductor decides.
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
    """A live migration ended because a user aborted it. The guest is still on its source."""

    def __init__(self) -> None:
        super().__init__("The migration was aborted.", reason=FailureReason.ABORTED)


class Cancelled(Exception):
    """A higher fence arrived while the verb ran; it stopped within five seconds."""


@contextmanager
def before_guest_is_touched() -> Iterator[None]:
    """Mark every failure in this block as one that leaves the guest as it was before the verb."""
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
    #: True when the verb must raise ``Cancelled``. A long verb calls it every few seconds.
    cancelled: Callable[[], bool]
    #: The last request for the running live migration, such as an abort.
    requested_control: Callable[[], Control | None] = _no_control
    #: Reports the progress of a migration in bytes: memory_total, memory_processed,
    #: memory_remaining, and the same with disk_.
    report_migration: Callable[[Mapping[str, int]], None] = _ignore_migration
    #: True if the command is still valid and this host holds its lease: conductors answered since
    #: the command was sent, without a gap and recently, so that none can have started the guests
    #: of this host elsewhere.
    may_start: Callable[[], bool] = _always

    def phase(self, phase: CommandPhase, percent: int | None = None) -> None:
        """Report the phase that the verb is in."""
        self.report_progress(CommandProgress(phase, percent))

    def require_lease(self) -> None:
        """Raise Unavailable unless this host may start guests.

        Called right before the CPUs of a guest start, because a long verb may outlive the lease
        with which it began. The conductor repeats the command if it is still valid.
        """
        if not self.may_start():
            raise errors.Unavailable(
                "The host has not heard a conductor lately, which may have its guests started "
                "elsewhere: nothing is started until it has."
            )


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a guest that another host may read.

    Attributes:
        size: the length of the file.
        bytes: the length of its data, without holes.
    """

    name: str
    size: int
    bytes: int


class Peer(Protocol):
    """The files of a guest on another host."""

    def parts(self) -> list[Part]:
        """Return the files.

        Raises:
            VerbFailed: the host does not offer them.
            Unavailable: the host does not answer.
        """

    def read(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, data) in rising order, at most 1 MiB each. Gaps are holes.

        Raises:
            VerbFailed: the data differs from the data that the host sent.
            Unavailable: the connection is lost.
        """


#: Stores an image: takes its bytes in chunks of at most 1 MiB, and returns when the image service
#: has all of them.
ImageWriter = Callable[[Iterator[bytes]], None]

#: Opens an image for reading: image id -> chunks of bytes, at most 1 MiB each.
ImageReader = Callable[[str], Iterator[bytes]]
