# SPDX-License-Identifier: Apache-2.0
"""docs/states.md: the states of a server and the actions between them.

    python -m deploy.site.states_diagram > docs/states.md

Run this after a change of ``common.domain.states.ACTIONS``. A test compares the page with the
output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.domain import states
from common.domain.states import ACTIONS, Action

HEAD = """# The states of a server

Made from the table `ACTIONS` in `common/domain/states.py` by `python -m deploy.site.states_diagram > docs/states.md`.

The states are those of `OS-EXT-STS:vm_state`, in which a server rests. An arrow is an action that succeeded. An action
that fails leads back to the first state, or to `error` if that state is not certain. Two end states depend on more
than the table: `rebuild` of a stopped server leaves the server stopped, and `shelve` continues to `shelved_offloaded`
if `shelved_offload_time` is 0.
"""
ACTIONS_HEAD = """
## The actions

*from*: the vm_states in which the action may start. *beside*: the task_states in which the action may start (empty:
only while no action is in hand, else the answer is 409). *meanwhile*: `OS-EXT-STS:task_state` while the action is in
hand. *lock*: a locked server refuses the action to all but admins. *ends others*: the action ends an action in hand
instead of being refused. `create`, `delete` and `softDelete` are no bodies: DELETE does `softDelete` while
`reclaim_instance_interval` is above 0.

| action | from | beside | meanwhile | after | lock | ends others | policy | since |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """Generate docs/states.md from the table ``ACTIONS``, and return the text."""
    return "".join(
        (
            HEAD,
            "\n```mermaid\nstateDiagram-v2\n",
            *(f"    {line}\n" for line in _diagram()),
            "```\n\n",
            _from_every_state(),
            ACTIONS_HEAD,
            *(f"{_row(row)}\n" for row in ACTIONS if row.query is None),
        )
    )


def edges() -> dict[tuple[str, str], list[str]]:
    """Return (from, to) -> names of the actions between these states, in the table's order.

    Actions that are allowed in every state, and actions without ``Action.after``, are left out. An
    action that leads back to its state is included.
    """
    actions_by_edge: dict[tuple[str, str], list[str]] = {}
    for row in ACTIONS:
        if row.vm == states.ANY or row.after is None:
            continue
        for vm_state in row.vm:
            names = actions_by_edge.setdefault((vm_state, row.after), [])
            if _name(row) not in names:
                names.append(_name(row))
    return actions_by_edge


def _name(row: Action) -> str:
    """Return the action's key in the request body, with the value that selects this row if any."""
    return f"{row.key} {row.when[1]}" if row.when else row.key


def _diagram() -> Iterator[str]:
    for vm_state in states.VM_STATES:
        yield f'state "{vm_state}" as {_id(vm_state)}'
    yield f"[*] --> {_id(states.BUILDING)}"
    for (start, end), names in edges().items():
        yield f"{_id(start)} --> {_id(end)} : {', '.join(names)}"
    yield f"{_id(states.DELETED)} --> [*]"


def _id(vm_state: str) -> str:
    return vm_state.replace("-", "_")


def _from_every_state() -> str:
    """Return a sentence with the actions that are allowed in every state and change the state."""
    rows = [row for row in ACTIONS if row.vm == states.ANY and row.after is not None]
    names = ", ".join(f"`{_name(row)}` (to `{row.after}`)" for row in rows)
    return f"From every state: {names}.\n"


def _row(row: Action) -> str:
    cells = (
        f"`{_name(row)}`",
        _any_or(row.vm),
        _any_or([task for task in row.task if task is not None]),
        f"`{row.during}`" if row.during else "",
        f"`{row.after}`" if row.after else "unchanged",
        "yes" if row.locked else "",
        "yes" if row.supersedes else "",
        f"`{row.policy}`",
        row.since,
    )
    return "| " + " | ".join(cells) + " |"


def _any_or(values: Sequence[str]) -> str:
    return "any" if tuple(values) == states.ANY else ", ".join(f"`{value}`" for value in values)


if __name__ == "__main__":
    print(page(), end="")
