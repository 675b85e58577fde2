# SPDX-License-Identifier: Apache-2.0
"""Records samples of a release's messages and of an agent's journal.

Run ``python -m tests.workflows.release_samples deploy/releases/VERSION`` at the commit of the
release. Every scenario runs on a simulated cloud. The folder gets ``messages.jsonl``, with one
sample for each kind of message, ``sealed.json`` and ``journal.sql``, which
``tests/workflows/test_releases.py`` reads, and the tables of each database, which
``tests/contract/test_store_upgrades.py`` upgrades.
"""

from __future__ import annotations

import base64
import json
import sqlite3
import sys
import tempfile
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from common.domain import ids, verbs
from common.domain.command_key import CommandKey, CommandKind
from common.domain.json_types import JsonObject
from common.domain.models import (
    Command,
    Control,
    Heartbeat,
    HeartbeatAnswer,
    RequestSpec,
    Result,
    Selection,
    Sync,
    SyncAnswer,
)
from common.domain.wire import from_wire, to_wire
from common.rpc.host_messages import pack
from common.security.host_keys import Purpose, derive
from common.store import schema
from compute_agent.journal import Journal
from tests.schemas import memory_store
from tests.workflows.scenarios import SCENARIOS, prepare
from tests.workflows.simulator import Cloud, Time

SECRET = "the command_secret of a sample"
#: Kind of message -> the longest sample, as JSON.
Samples = dict[str, str]


def record(samples: Samples, kind: str, message: object) -> None:
    """Keep the message as the sample of its kind, unless the sample so far is as long."""
    text = json.dumps(to_wire(message), sort_keys=True)
    if len(text) > len(samples.get(kind, "")):
        samples[kind] = text


class RecordingCloud(Cloud):
    """A simulated cloud that records its messages."""

    def __init__(self, samples: Samples) -> None:
        time = Time()
        super().__init__(memory_store(time), time)
        self._samples = samples

    def do(self, host: str, commands: list[Command]) -> None:
        for command in commands:
            record(self._samples, f"Command {command.verb}", command)
        super().do(host, commands)

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        selections = super().select(specs, fresh)
        for message in (*specs, *selections):
            record(self._samples, type(message).__name__, message)
        return selections

    def exchange(self, request: Sync) -> SyncAnswer:
        content = "registration" if request.inventory else "results" if request.results else "state"
        record(self._samples, f"Sync {content}", request)
        verb_of = {str(command.key): command.verb for _, command in self.sent}
        for result in request.results:
            if verb := verb_of.get(result.key):
                record(self._samples, f"Result {verb} {result.status}", result)
        answer = super().exchange(request)
        record(self._samples, "SyncAnswer", answer)
        return answer

    def answer_heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        answer = super().answer_heartbeat(beat)
        record(self._samples, "Heartbeat", beat)
        record(self._samples, "HeartbeatAnswer", answer)
        return answer


def record_scenarios(folder: Path, names: Iterable[str]) -> None:
    """Run these scenarios, and write the samples into the folder.

    The scenario ``swap_volume`` must be one of them, because ``record_rare_commands`` needs it.
    """
    samples: Samples = {}
    for name in names:
        cloud = RecordingCloud(samples)
        trial = prepare(cloud, name)
        trial.begin()
        cloud.settle()
        cloud.store.close()
    record_rare_commands(samples)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[JsonObject] = [
        {"kind": kind, "content": json.loads(samples[kind])} for kind in sorted(samples)
    ]
    (folder / "messages.jsonl").write_text(
        "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    )
    (folder / "sealed.json").write_text(json.dumps(seal(samples), indent=1) + "\n")
    results = [line["content"] for line in lines if line["kind"].startswith("Result ")]
    (folder / "journal.sql").write_text(dump_journal([from_wire(Result, row) for row in results]))


def record_rare_commands(samples: Samples) -> None:
    """Record the commands that no scenario needs."""
    migration = CommandKey(CommandKind.DO, ids.new(), "live_migrate", 1)
    control = verbs.control_command(migration, Control.ABORT, server=ids.new(), fence=2, session=1)
    record(samples, f"Command {control.verb}", control)
    switch = from_wire(Command, json.loads(samples["Command switch_volume"]))
    # Both verbs have the arguments of VolumeVerb.
    record(samples, "Command keep_volume", replace(switch, verb="keep_volume"))


def seal(samples: Samples) -> JsonObject:
    """Return a heartbeat as RabbitMQ carries it, with the secret of which the key is derived."""
    key = derive(SECRET, "h1", 1, Purpose.COMMAND)
    content = {"beat": json.loads(samples["Heartbeat"])}
    _, body = pack(key, "heartbeat", content, answer_to="kilonova-answers-h1")
    return {"secret": SECRET, "content": content, "body": base64.b64encode(body).decode()}


def dump_journal(results: list[Result]) -> str:
    """Return the SQL of a journal with results, an interrupted command and a fencing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = Journal(path)
        for result in results:
            journal.end(result)
        journal.begin("interrupted")
        journal.begin_fencing("boot")
        journal.close()
        with closing(sqlite3.connect(path)) as database:
            return "".join(f"{line}\n" for line in database.iterdump())


def record_tables(folder: Path) -> None:
    """Write the statements that create all tables, one line each, for each database."""
    for url in ("sqlite://", "postgresql+psycopg://", "mariadb+pymysql://"):
        statements: list[sa.schema.ExecutableDDLElement] = []
        engine = sa.create_mock_engine(url, lambda ddl, *_, to=statements, **__: to.append(ddl))
        schema.metadata.create_all(engine, checkfirst=False)
        texts = [str(statement.compile(dialect=engine.dialect)) for statement in statements]
        lines = "".join(f"{' '.join(text.split())};\n" for text in texts)
        (folder / f"schema-{engine.dialect.name}.sql").write_text(lines)


if __name__ == "__main__":
    record_tables(Path(sys.argv[1]))
    record_scenarios(Path(sys.argv[1]), SCENARIOS)
    recorded = (Path(sys.argv[1]) / "messages.jsonl").read_text()
    if missing := [verb for verb in verbs.VERBS if f'"kind": "Command {verb}"' not in recorded]:
        sys.exit(f"no scenario sends these verbs; add scenarios: {', '.join(missing)}")
