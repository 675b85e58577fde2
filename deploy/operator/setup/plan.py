# SPDX-License-Identifier: Apache-2.0
"""A plan: a table of steps, each with a check of the machine's state.

No file records progress. After an interruption, the same command finds the completed steps by their
checks and continues with the next step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from common.domain import errors
from common.domain.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """A step of a plan.

    Attributes:
        title: The result of the step, for the operator.
        look: Returns True if the machine has the result. Raises ConfigError if the machine has
            another result, which ``do`` would overwrite.
        do: Produces the result. May be repeated after an interruption at any moment.
    """

    title: str
    look: Callable[[], bool]
    do: Callable[[], None]


def carry_out(steps: Sequence[Step], *, yes: bool, output: TextIO | None = None) -> None:
    """Print the plan, ask the operator unless ``yes``, and carry out the steps that are to do.

    Plan and progress go to ``output``, by default the standard output.

    Raises:
        ConfigError: The machine contradicts the plan, the operator does not agree, or a step fails.
            The text names the step, the reason and the next command.
    """
    states = [step.look() for step in steps]
    for step, is_done in zip(steps, states, strict=True):
        print(f"  {'done ' if is_done else 'to do'}  {step.title}", file=output, flush=True)
    if all(states):
        print("All steps are done. This command changed nothing.", file=output)
        return
    if not yes:
        _ask()
    for number, step in enumerate(steps, 1):
        if step.look():
            continue
        name = f"step {number} of {len(steps)}"
        print(f"{name}: {step.title}", file=output, flush=True)
        try:
            step.do()
            if not step.look():
                raise ConfigError("the commands succeeded, but the result is missing")
        except (errors.Problem, ConfigError, OSError, KeyboardInterrupt) as problem:
            raise ConfigError(
                f"{name} ({step.title}) failed: {str(problem) or 'interrupted'}\nCorrect the cause, and run the same "
                "command again. It continues with this step"
            ) from problem


def _ask() -> None:
    """Read the operator's answer from the terminal. Raise ConfigError unless it is yes."""
    if not sys.stdin.isatty():
        raise ConfigError("standard input is no terminal: give --yes to carry out the plan")
    print("Carry out the steps to do? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was changed, because you did not agree to the plan")
