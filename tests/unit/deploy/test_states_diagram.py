# SPDX-License-Identifier: Apache-2.0
"""docs/states.md: equal to the page generated from the table of actions, and complete."""

from __future__ import annotations

from pathlib import Path

from common.domain import states
from deploy.site import states_diagram

PAGE = Path(__file__).resolve().parents[3] / "docs/states.md"


def test_states_page_equals_generated_page() -> None:
    assert PAGE.read_text() == states_diagram.page(), (
        "run: python -m deploy.site.states_diagram > docs/states.md"
    )


def test_states_page_has_every_state_and_action() -> None:
    text = states_diagram.page()
    for vm_state in states.VM_STATES:
        assert f'state "{vm_state}" as ' in text
    for row in states.ACTIONS:
        if row.query is None:
            assert f"| `{row.key}" in text


def test_states_diagram_edges_are_actions() -> None:
    edges = states_diagram.edges()
    assert edges["active", "paused"] == ["pause"]
    assert edges["paused", "active"] == ["reboot HARD", "unpause"]
    assert edges["shelved_offloaded", "active"] == ["unshelve"]
    assert ("deleted", "active") not in edges
    assert "delete" not in {name for names in edges.values() for name in names}, (
        "they are said once, for every state"
    )
