# SPDX-License-Identifier: Apache-2.0
"""``kilonova cleanup list``, ``retry`` and ``cancel``.

The tests include the pending cleanups in the output of ``doctor`` and ``status``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.store import cleanups
from common.store.engine import Store
from deploy.operator.doctor import command as doctor
from deploy.operator.main import main
from tests.schemas import upgrade

SERVER, PORT, IMAGE = (f"{number}a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11" for number in (6, 7, 8))
TRUNK = "The network service says: the port is a parent port for a trunk."


@pytest.fixture
def conf(tmp_path: Path) -> str:
    path = tmp_path / "kilonova.conf"
    path.write_text(f"[database]\nurl = sqlite:///{tmp_path}/k.db\n")
    return str(path)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    new_store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(new_store)
    yield new_store
    new_store.close()


def add_cleanups(store: Store) -> list[Any]:
    """Add pending cleanups of a binding, which was tried once, and of an image."""
    row = {"args": {}, "server_id": SERVER, "project_id": "p", "place": ""}
    store.write(
        lambda tx: cleanups.add(
            tx,
            [
                {
                    **row,
                    "kind": cleanups.BINDING,
                    "target": PORT,
                    "place": "h1",
                    "why": "It is silent.",
                },
                {**row, "kind": cleanups.IMAGE, "target": IMAGE, "why": "The image is protected."},
            ],
        )
    )
    [first, _] = store.write(lambda tx: cleanups.take(tx, [cleanups.BINDING, cleanups.IMAGE], 9))
    store.write(lambda tx: cleanups.postpone(tx, first, TRUNK, cleanups.REFUSED_AT_MOST))
    return store.read(cleanups.list_all)


def test_cleanup_list_is_empty_without_pending_cleanups(
    conf: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", conf, "cleanup", "list"]) == 0
    assert capsys.readouterr().out == "no cleanup is pending\n"
    assert main(["--config", conf, "cleanup", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_cleanup_list_names_target_host_tries_and_reason(
    conf: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    add_cleanups(store)
    assert main(["--config", conf, "cleanup", "list"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"binding {PORT} at h1" in lines[1] and SERVER in lines[1]
    assert lines[2].strip() == TRUNK
    assert f"image {IMAGE}" in lines[3] and lines[-1] == "2 pending cleanups"
    assert main(["--config", conf, "cleanup", "list", "--json"]) == 1
    entries = json.loads(capsys.readouterr().out)
    assert [
        (entry["kind"], entry["target"], entry["place"], entry["tries"], entry["why"])
        for entry in entries
    ] == [("binding", PORT, "h1", 1, TRUNK), ("image", IMAGE, None, 0, "The image is protected.")]


def test_status_and_doctor_list_pending_cleanups_without_a_finding(
    conf: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    add_cleanups(store)
    assert main(["--config", conf, "doctor", "--no-hosts"]) == doctor.NO_ANSWER
    output = capsys.readouterr().out
    assert (
        "nothing found; not checked: " in output
        and f"server {SERVER}: binding {PORT} at h1, tried 1 times: {TRUNK}" in output
    )
    assert main(["--config", conf, "status"]) == 0
    assert "cleanups: 2" in capsys.readouterr().out


def test_cleanup_retry_makes_cleanup_due_and_cleanup_cancel_removes_it(
    conf: str, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = add_cleanups(store)
    assert store.write(lambda tx: cleanups.take(tx, [cleanups.BINDING, cleanups.IMAGE], 9)) == []
    assert main(["--config", conf, "cleanup", "retry", str(first.id)]) == 0
    assert [row.id for row in store.write(lambda tx: cleanups.take(tx, [cleanups.BINDING], 9))] == [
        first.id
    ]
    assert main(["--config", conf, "cleanup", "cancel", str(second.id)]) == 0
    assert [row.id for row in store.read(cleanups.list_all)] == [first.id]
    capsys.readouterr()
    for verb in ("retry", "cancel"):
        assert main(["--config", conf, "cleanup", verb, str(second.id)]) == 1
        assert capsys.readouterr().err == f"kilonova: there is no pending cleanup {second.id}\n"
