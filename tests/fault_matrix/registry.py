# SPDX-License-Identifier: Apache-2.0
"""The registry of workflows, changed so that watchers see each function of a step begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from conductor.engine.step import AnyStep
from conductor.workflows import WORKFLOWS

PARTS = ("prepare", "apply", "call", "command", "on_result", "undo", "undo_call", "undo_command")
#: Called with workflow, step, function, "begins" or "ends", and the arguments of the function.
Watcher = Callable[[str, str, str, str, Sequence[object]], None]
_watchers: list[Watcher] = []


def _watch_step(workflow: str, step: AnyStep) -> AnyStep:
    changed: dict[str, Any] = {}
    for part in PARTS:
        if (function := getattr(step, part)) is not None:
            changed[part] = _report_calls(function, workflow, step.name, part)
    return replace(step, **changed)


def _report_calls(
    function: Callable[..., Any], workflow: str, step: str, part: str
) -> Callable[..., Any]:
    def call_and_report(*arguments: Any) -> Any:
        for watcher in _watchers:
            watcher(workflow, step, part, "begins", arguments)
        result = function(*arguments)
        for watcher in _watchers:
            watcher(workflow, step, part, "ends", arguments)
        return result

    return call_and_report


_ORIGINAL = dict(WORKFLOWS)
_WATCHED = {
    name: replace(story, steps=tuple(_watch_step(name, step) for step in story.steps))
    for name, story in WORKFLOWS.items()
}


@contextmanager
def watch_steps(watcher: Watcher) -> Iterator[None]:
    """Call a watcher at the begin and the end of every function of every step."""
    _watchers.append(watcher)
    WORKFLOWS.update(_WATCHED)
    try:
        yield
    finally:
        WORKFLOWS.update(_ORIGINAL)
        _watchers.remove(watcher)
