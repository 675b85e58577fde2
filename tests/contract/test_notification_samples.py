# SPDX-License-Identifier: Apache-2.0
"""Every payload that we tell against Nova's sample of it: names, versions, keys and types of JSON.

The samples are data out of Nova's source. The payloads are those of every workflow, done and
failed, on servers that have all that a payload can show. How many agree is printed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import hardware
from common.notifications.events import Notice
from common.service.notification_options import VERSIONED, VM_AND_TASK_STATE, NotificationSettings
from common.store import schema
from common.store.notifications import outbox
from compute_agent.virt.memory.state.script import Fail
from conductor.notifications.messages import messages
from deploy.environment import SAMPLES, has_samples
from tests.schemas import memory_store
from tests.told import all_told, story_of_nouns
from tests.workflows.scenarios import SCENARIOS, trial_of
from tests.workflows.simulator import Cloud, Time

#: Objects that Nova has and names in no sample: an action of ours that fails is told as its other
#: phases are.
OTHERS = ("service-", "aggregate-", "flavor-", "keypair-", "server_group-")
PHASES = ("error", "end", "start")
#: Keys whose values are maps of the user's, or of an image's properties.
FREE = ("metadata", "meta", "extra_specs", "scheduler_hints", "rules")
FREE_OBJECTS = ("ImageMetaPropsPayload",)
SHAPE: dict[str, Any] = {
    "key_name": "k",
    "key_data": "ssh-ed25519 AAAA",
    "tags": ["a"],
    "trusted_image_certificates": ["c"],
    "meta": {"a": "b"},
    "description": "d",
    "locked_reason": "r",
    "image": {
        "id": "i",
        "disk_format": "qcow2",
        "size": 1,
        "properties": {"hw_architecture": "x86_64"},
    },
}


@pytest.fixture(scope="module")
def samples() -> Path:
    if has_samples():
        return SAMPLES
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail(
            "the samples of Nova's notifications are not there: ./deploy/test fetches them in its first steps"
        )
    pytest.skip("needs the samples of Nova's notifications; fetched by: ./deploy/test contract")


@cache
def resolved(path: Path) -> Any:
    """A sample with what it refers to."""
    return _resolved(json.loads(path.read_text()), path.parent)


def _resolved(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_resolved(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    own = {key: _resolved(item, folder) for key, item in value.items() if key != "$ref"}
    if "$ref" not in value:
        return own
    name = value["$ref"].removesuffix("#")
    known = next(
        path for path in (folder / name, folder / "common_payloads" / name) if path.exists()
    )
    return _merged(resolved(known), own)


def _merged(base: Any, own: Any) -> Any:
    if isinstance(base, dict) and isinstance(own, dict):
        return base | {key: _merged(base.get(key), value) for key, value in own.items()}
    return own


def sample_of(event: str, folder: Path) -> Any:
    """The event's own sample, or that of its action in another phase."""
    *words, _phase = event.split(".")
    stem = "-".join(words)
    names = [f"{event.replace('.', '-')}.json", *(f"{stem}-{other}.json" for other in PHASES)]
    return next((resolved(folder / name) for name in names if (folder / name).exists()), None)


def differences(ours: Any, theirs: Any, where: str) -> Iterator[str]:
    """What of ours a reader of theirs would not understand; a sample cannot say what else than null
    a null may be."""
    if ours is None or theirs is None:
        return
    if kind(ours) != kind(theirs):
        yield f"{where} is {kind(ours)}, not {kind(theirs)}"
    elif isinstance(ours, list) and theirs:
        for item in ours:
            yield from differences(item, theirs[0], f"{where}[]")
    elif isinstance(ours, dict) and where.rpartition(".")[2] not in FREE:
        if ours.get("nova_object.name") in FREE_OBJECTS:
            ours, theirs = (one | {"nova_object.data": {}} for one in (ours, theirs))
        for name in ("nova_object.name", "nova_object.version", "nova_object.namespace"):
            if ours.get(name) != theirs.get(name):
                yield f"{where} has {name} {ours.get(name)}, not {theirs.get(name)}"
        for key in sorted(ours.keys() ^ theirs.keys()):
            yield f"{where}.{key} is {'new' if key in ours else 'missing'}"
        for key in ours.keys() & theirs.keys():
            yield from differences(
                ours[key], theirs[key], f"{where}.{key}" if key != "nova_object.data" else where
            )


def kind(value: Any) -> str:
    return "number" if isinstance(value, float) else type(value).__name__


def all_rows() -> list[Any]:
    """What every workflow tells, when it succeeds and when each of its verbs fails."""
    found = []
    for workflow, scenario in SCENARIOS.items():
        for verb in ("", *(() if scenario.brief else scenario.verbs)):
            time = Time()
            cloud = Cloud(memory_store(time), time)
            trial = trial_of(cloud, workflow)
            cloud.store.notify_with(NotificationSettings("api", VM_AND_TASK_STATE))
            for host in cloud.hosts.values() if verb else ():
                host.driver.host.script[verb] = [Fail("It broke.", details="because")] * 3
            trial.begin()
            shape = {**SHAPE, "image": {**SHAPE["image"], hardware.ON_VOLUME: scenario.boots}}
            cloud.store.write(
                lambda tx, server=trial.server, shape=shape: tx.execute(
                    sa.update(schema.servers).where(schema.servers.c.id == server).values(shape)
                )
            )
            cloud.settle()
            found += all_told(cloud.store)
            cloud.store.close()
    return found


def without_workflow() -> list[Any]:
    """What no workflow tells: the usage audit, and what becomes of a wish for a live migration."""
    names = (
        "instance.exists",
        *(
            f"instance.live_migration_{wish}.{phase}"
            for wish in ("abort", "force_complete")
            for phase in ("start", "end")
        ),
    )
    time = Time()
    cloud = Cloud(memory_store(time), time)
    trial = trial_of(cloud, "stop")
    cloud.store.notify_with(NotificationSettings("api"))
    cloud.store.write(
        lambda tx: outbox.add(
            tx, [Notice(name, trial.server, {"id": "r", "user": "u"}) for name in names]
        )
    )
    return all_told(cloud.store)


def no_host() -> list[Any]:
    """What is told when no host is found."""
    found = []
    for workflow in ("create", "resize", "live_migrate"):
        time = Time()
        cloud = Cloud(memory_store(time), time)
        trial = trial_of(cloud, workflow)
        cloud.store.notify_with(NotificationSettings("api"))
        for name in cloud.hosts:
            cloud.force_down(name)
        trial.begin()
        cloud.settle()
        found += all_told(cloud.store)
        cloud.store.close()
    return found


def judge(rows: list[Any], folder: Path) -> tuple[set[str], dict[str, set[str]]]:
    """The events that were looked at, and what differs, by event."""
    seen, wrong = set(), {}
    for row in rows:
        [message] = messages(row, VERSIONED)
        theirs = sample_of(message.event, folder)
        seen.add(message.event)
        differs = (
            {f"no sample of {message.event}"}
            if theirs is None
            else set(
                differences(json.loads(json.dumps(message.payload)), theirs["payload"], "payload")
            )
        )
        if theirs is not None and theirs["event_type"] == message.event:
            priority = "ERROR" if message.is_error else "INFO"
            differs |= {f"priority {priority}"} if theirs["priority"] != priority else set()
            source = theirs["publisher_id"].split(":")[0]
            differs |= (
                {f"from {message.publisher}"}
                if message.publisher.split(":")[0] != source
                else set()
            )
        if differs:
            wrong.setdefault(message.event, set()).update(differs)
    return seen, wrong


@pytest.mark.slice("operations")
def test_what_servers_tell_is_as_in_the_samples(samples: Path) -> None:
    seen, wrong = judge(all_rows() + no_host() + without_workflow(), samples)
    own = sum((samples / f"{event.replace('.', '-')}.json").exists() for event in seen)
    print(
        f"\n{len(seen)} events of servers checked against Nova's samples, {own} of them have one of their own; "
        f"{len(seen) - len(wrong)} agree"
    )
    assert wrong == {}
    assert len(seen) > 60


def test_what_else_is_told_is_as_in_the_samples(samples: Path) -> None:
    store = memory_store(Time())
    store.notify_with(NotificationSettings("api"))
    story_of_nouns(store)
    seen, wrong = judge(all_told(store), samples)
    print(
        f"\n{len(seen)} other events checked against Nova's samples, {len(seen) - len(wrong)} agree"
    )
    assert wrong == {}
    assert seen == {
        path.stem.replace("-", ".")
        for path in samples.glob("*.json")
        if path.stem.startswith(OTHERS)
    }


def test_a_difference_is_seen(samples: Path) -> None:
    ours = resolved(samples / "instance-create-end.json")["payload"]
    assert list(differences(ours, ours, "payload")) == []
    data = ours["nova_object.data"]
    for changed in (
        {"host": 1},
        {"more": 1},
        {"flavor": data["flavor"] | {"nova_object.version": "9"}},
        {"ip_addresses": [{}]},
    ):
        assert list(differences(ours | {"nova_object.data": data | changed}, ours, "payload")), (
            changed
        )
    less = {key: value for key, value in data.items() if key != "uuid"}
    assert list(differences(ours | {"nova_object.data": less}, ours, "payload")) == [
        "payload.uuid is missing"
    ]
