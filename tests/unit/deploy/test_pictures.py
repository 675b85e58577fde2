# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/pictures: SVG files show their sources, and the sources match the tables."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from common.domain import states
from conductor.workflows.create import CREATE
from deploy.packages import ROOT
from deploy.site import states_diagram

SOURCES = sorted((ROOT / "docs/pictures").glob("*.dot"))
LIFE = (ROOT / "docs/pictures/life.dot").read_text()
#: Two states and the label of the edge between them. Quotes around a state are optional.
EDGE = re.compile(r'^  "?([\w-]+)"? -> "?([\w-]+)"? \[label="([^"]+)"', re.MULTILINE)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_svg_has_texts_and_edges_of_its_dot_source(source: Path) -> None:
    dot = source.read_text()
    root = ElementTree.parse(source.with_suffix(".svg")).getroot()
    shown = "|".join(text for text in root.itertext() if text.strip())
    labels = re.findall(r'label="([^"]+)"|label=<(.+)>[],]', dot)
    lines = [
        html.unescape(re.sub("<[^>]+>", "", line)).strip()
        for label in labels
        for line in re.split(r"\\n|<br/>", "".join(label))
    ]
    missing = [line for line in lines if line not in shown]
    chains = re.findall(r"^  (\S+(?: -> [^ ;]+)+)", dot, re.MULTILINE)
    edges = {
        "->".join(pair)
        for chain in chains
        for pair in itertools.pairwise(chain.replace('"', "").split(" -> "))
    }
    drawn = {group[0].text for group in root.iter() if group.get("class") == "edge"}
    assert (missing, drawn) == ([], edges), (
        "run: dot -Tsvg docs/pictures/NAME.dot -o docs/pictures/NAME.svg"
    )


def test_server_life_picture_shows_every_state_except_building() -> None:
    nodes = set(re.findall(r'^  "?([\w-]+)"?(?: ->| \[fill|;$)', LIFE, re.MULTILINE))
    nodes |= {end for _, end, _ in EDGE.findall(LIFE)}
    assert nodes - {"node", "edge"} == {*states.VM_STATES} - {states.BUILDING}


def test_server_life_picture_shows_only_edges_of_actions() -> None:
    edges = states_diagram.edges()
    shown = [
        (start, end, name) for start, end, names in EDGE.findall(LIFE) for name in names.split(", ")
    ]
    assert shown
    assert [edge for edge in shown if edge[2] not in edges.get(edge[:2], [])] == []


def test_picture_of_create_shows_exactly_the_steps_of_workflow() -> None:
    dot = (ROOT / "docs/pictures/create.dot").read_text()
    _, *steps = re.search(r"^  (request -> .+);$", dot, re.MULTILINE)[1].split(" -> ")
    assert steps == [step.name for step in CREATE.steps]
