# SPDX-License-Identifier: Apache-2.0
"""The pictures are up to date, well-formed, and say nothing that the tables do not say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from common import states
from conductor.workflows.create import CREATE
from deploy import pictures, states_diagram


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_what_is_drawn(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert (pictures.FOLDER / name).read_text() == drawn, "run: python -m deploy.pictures"
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


def test_every_state_but_the_first_is_drawn() -> None:
    assert pictures.STATES.keys() == {*states.VM_STATES} - {states.BUILDING}


def test_ways_are_what_actions_do() -> None:
    edges = states_diagram.edges()
    wrong = [
        (start, end, name)
        for start, end, names, _, _ in pictures.WAYS
        for name in names
        if name not in edges.get((start, end), [])
    ]
    assert wrong == []


def test_steps_of_a_create_are_the_workflows() -> None:
    assert [name for name, _ in pictures.STEPS] == [step.name for step in CREATE.steps]
