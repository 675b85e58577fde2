# SPDX-License-Identifier: Apache-2.0
"""The operator's fencing hook: a program that makes sure that nothing runs on a host.

Called by the step ``fence`` of evacuate, in a lane of its own, because switching a machine off
takes its time. The hook gets the host's name and nothing else; only its exit with 0 is proof. It
may be called again for the same host; but the servers of a host are evacuated together, and what it
says of the host is said to all of them. Must stay true: it is ``SHARED_SECONDS`` only for less than
a host takes to boot, so that nobody is told of what came before a boot.
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from common.domain import errors

log = logging.getLogger(__name__)
MAX_SHOWN_CHARACTERS = 500  #: characters of what a hook said that are told
SHARED_SECONDS = 2.0  #: seconds after its end in which the hook's word is told to others


def hook(
    program: str, timeout: float, shared: float = SHARED_SECONDS
) -> Callable[[str], None] | None:
    """What fences a host by this program; None when there is none.

    The callable raises Conflict: the host is not fenced, with what the hook said.
    """
    if not program:
        return None
    said: dict[str, _Word] = defaultdict(_Word)
    adding = threading.Lock()

    def fence(host: str) -> None:
        with adding:
            word = said[host]
        with word.lock:
            if time.monotonic() > word.fresh_until:
                word.refusal = _ask(program, timeout, host)
                word.fresh_until = time.monotonic() + shared
            if word.refusal:
                raise errors.Conflict(word.refusal)

    return fence


@dataclass
class _Word:
    """What the hook has said of a host last: why it is not fenced, or "" for proof."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    fresh_until: float = 0
    refusal: str = ""


def _ask(program: str, timeout: float, host: str) -> str:
    """Run the hook; why the host is not fenced, or ""."""
    log.warning("fencing host %s by %s", host, program)
    try:
        done = subprocess.run(
            [program, host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        log.error("the fencing hook for host %s did not end within %g seconds", host, timeout)
        return f"The fencing hook did not end within {timeout:g} seconds; host {host} may still run its guests."
    except OSError as problem:
        log.error("the fencing hook for host %s cannot be run: %s", host, problem)
        return (
            f"The fencing hook cannot be run; host {host} may still run its guests. Ask the operator to look at "
            "[conductor] fencing_hook."
        )
    said = (done.stderr or done.stdout).decode(errors="replace").strip()[-MAX_SHOWN_CHARACTERS:]
    if done.returncode != 0:
        log.error("the fencing hook for host %s ended with %d: %s", host, done.returncode, said)
        return (
            f"The fencing hook ended with {done.returncode}; host {host} may still run its guests."
        )
    log.warning("host %s is fenced", host)
    return ""
