# SPDX-License-Identifier: Apache-2.0
"""The registry with every function of every step watched: who looks sees each part of a step begin
and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from conductor.engine.step import AnyStep
from conductor.workflows import WORKFLOWS

PARTS = ("prepare", "apply", "call", "command", "on_result", "undo", "undo_call", "undo_command")
#: Workflow, step, part, whether it begins or ends, and what the part is given.
Watcher = Callable[[str, str, str, str, Sequence[object]], None]
_watchers: list[Watcher] = []


def _watched(workflow: str, step: AnyStep) -> AnyStep:
    changed: dict[str, Any] = {}
    for part in PARTS:
        if (function := getattr(step, part)) is not None:
            changed[part] = _told(function, workflow, step.name, part)
    return replace(step, **changed)


def _told(function: Callable[..., Any], workflow: str, step: str, part: str) -> Callable[..., Any]:
    def told(*arguments: Any) -> Any:
        for watcher in _watchers:
            watcher(workflow, step, part, "begins", arguments)
        made = function(*arguments)
        for watcher in _watchers:
            watcher(workflow, step, part, "ends", arguments)
        return made

    return told


_ORIGINAL = dict(WORKFLOWS)
_WATCHED = {
    name: replace(story, steps=tuple(_watched(name, step) for step in story.steps))
    for name, story in WORKFLOWS.items()
}


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell this watcher of all steps."""
    _watchers.append(watcher)
    WORKFLOWS.update(_WATCHED)
    try:
        yield
    finally:
        WORKFLOWS.update(_ORIGINAL)
        _watchers.remove(watcher)
