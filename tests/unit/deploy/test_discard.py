# SPDX-License-Identifier: Apache-2.0
"""``kilonova host discard``: refused requests and recorded pending removals."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain.json_types import JsonObject
from common.domain.models import HostInventory
from common.domain.statuses import GuestState
from common.rpc import agent
from common.rpc.host_link import ControlSide
from common.store import schema
from common.store.engine import Store
from common.store.hosts import hosts
from deploy.operator.hosts import discard as host_discard
from deploy.operator.main import main
from tests.schemas import upgrade

SERVER, OTHER = "6a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", "7b1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"

FILES = "8c1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11"


class Host:
    """A host that runs the guest of one server and has files of another."""

    def __init__(self, link: ControlSide) -> None:
        """Ignore the link, because ``query`` answers without messages."""

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        assert host == "a"
        return {"domains": {"domains": {SERVER: 1}}, "files": {"servers": [FILES]}}[verb]


@pytest.mark.parametrize(
    ("words", "up", "said"),
    [
        (["a", SERVER], True, "repeat the command with --yes"),
        (["a", SERVER, "--yes"], False, "does not answer"),
        (["a", "web1", "--yes"], True, "is not the id of a server"),
        (["b", SERVER, "--yes"], True, "There is no host b"),
        (["a", OTHER, "--yes"], True, f"Host a has no guest of server {OTHER}"),
        (["a", OTHER], True, f"Host a has no guest of server {OTHER}"),
        (["a", SERVER, "--yes"], True, ""),
        (["a", FILES, "--yes"], True, ""),
    ],
)
def test_host_discard_records_removal_only_with_yes_for_guest_of_up_host(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    up: bool,
    said: str,
) -> None:
    monkeypatch.setattr(agent, "AgentClient", Host)
    monkeypatch.setattr(host_discard, "ports_of", lambda conf: lambda server: None)
    conf = tmp_path / "kilonova.conf"
    conf.write_text(
        f"[DEFAULT]\ntransport_url = kombu+memory://\n[database]\nurl = sqlite:///{tmp_path}/k.db\n"
    )
    store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(store)
    inventory = HostInventory("QEMU", 7002000, "", 4, 8192, 9)
    store.write(lambda tx: hosts.register(tx, "a", "boot", inventory))
    store.write(lambda tx: tx.execute(sa.update(schema.heartbeats).values(up=up)))
    status = main(["--config", str(conf), "host", "discard", *words])
    output = capsys.readouterr()
    guests = store.read(lambda tx: tx.execute(sa.select(schema.guests)).all())
    store.close()
    assert (status, said in output.out + output.err) == (1 if said else 0, True), output
    assert [(row.server_id, row.host, row.wanted) for row in guests] == (
        [] if said else [(words[1], "a", GuestState.ABSENT)]
    )
