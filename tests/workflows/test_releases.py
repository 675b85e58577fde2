# SPDX-License-Identifier: Apache-2.0
"""This code reads the messages and the agent's journal of each release in deploy/releases.

Samples that are recorded from this code itself show that recording and reading fit together.
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from common.domain import models, verbs
from common.domain.json_types import JsonObject, JsonValue
from common.domain.wire import from_wire, to_wire
from common.rpc.host_messages import Header, unpack
from common.security.host_keys import OwnKeys, Purpose, derive
from compute_agent.journal import Journal
from tests.workflows.release_samples import record_scenarios

#: The folders of the releases.
RELEASES = sorted((Path(__file__).parents[2] / "deploy/releases").glob("*"))


def find_lost(sent: JsonValue, read: JsonValue, place: str = "") -> list[str]:
    """Return the places of values in a message that the reader dropped or changed."""
    lost: list[str] = []
    if isinstance(sent, dict) and isinstance(read, dict):
        for name, value in sent.items():
            inner = f"{place}.{name}"
            lost += find_lost(value, read[name], inner) if name in read else [inner]
        return lost
    if isinstance(sent, list) and isinstance(read, list) and len(sent) == len(read):
        for number, (old, new) in enumerate(zip(sent, read, strict=True)):
            lost += find_lost(old, new, f"{place}[{number}]")
        return lost
    return [] if sent == read else [place]


def read_messages(release: Path) -> list[tuple[str, JsonObject]]:
    lines = (release / "messages.jsonl").read_text().splitlines()
    return [(line["kind"], line["content"]) for line in map(json.loads, lines)]


@pytest.fixture(
    scope="module",
    params=[*RELEASES, None],
    ids=[*(release.name for release in RELEASES), "this-code"],
)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the samples of a release, or with new samples of this code."""
    if request.param is not None:
        folder: Path = request.param
        assert re.fullmatch(r"[0-9a-f]{40}\n", (folder / "commit").read_text())
        return folder
    folder = tmp_path_factory.mktemp("samples")
    record_scenarios(folder, ("create", "swap_volume"))
    return folder


def test_messages_of_release_are_read_without_loss(release: Path) -> None:
    messages = read_messages(release)
    assert messages
    for kind, content in messages:
        message = from_wire(getattr(models, kind.split()[0]), content)
        assert find_lost(content, to_wire(message)) == [], kind


def test_commands_of_release_are_decoded_without_loss(release: Path) -> None:
    commands = [
        from_wire(models.Command, content)
        for kind, content in read_messages(release)
        if kind.startswith("Command ")
    ]
    assert commands
    for command in commands:
        assert find_lost(command.args, to_wire(verbs.decode(command))) == [], command.verb


def test_sealed_message_of_release_is_opened(release: Path) -> None:
    sealed = json.loads((release / "sealed.json").read_text())
    body = base64.b64decode(sealed["body"])
    header = Header.read(body.partition(b"\n")[0])
    key = derive(sealed["secret"], header.host, header.generation, Purpose(header.purpose))
    keys = OwnKeys(header.host, header.generation, {key.purpose: key.secret.hex()})
    assert unpack(keys, body) == (header, sealed["content"])


def test_journal_of_release_keeps_results_and_fences(release: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "journal")) as database:
        database.executescript((release / "journal.sql").read_text())
        # The journal deletes records after a week.
        database.execute("UPDATE results SET at = unixepoch()")
        database.execute("UPDATE fences SET at = unixepoch()")
        database.commit()
    results = [
        from_wire(models.Result, content)
        for kind, content in read_messages(release)
        if kind.startswith("Result ")
    ]
    journal = Journal(tmp_path / "journal")
    assert results and [journal.find(result.key) for result in results] == results
    assert journal.has_begun("interrupted") and journal.find("interrupted") is None
    assert set(journal.fences()) == {result.server for result in results}
    assert journal.fencings("boot") == (1, True)
    journal.close()
