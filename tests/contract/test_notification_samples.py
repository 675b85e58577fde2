# SPDX-License-Identifier: Apache-2.0
"""Notification payloads against Nova's samples: names, versions, keys and JSON types.

The samples are data from Nova's source. The payloads come from every workflow, successful and
failed, on servers that use all fields of a payload. The tests print the number of matching events.
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
from tests.outbox_events import change_all_but_servers, read_outbox
from tests.schemas import memory_store
from tests.workflows.scenarios import SCENARIOS, trial_of
from tests.workflows.simulator import Cloud, Time

#: Prefixes of the samples without servers. For an action that Nova has no failure sample for, the
#: sample of another phase is used.
OTHERS = ("service-", "aggregate-", "flavor-", "keypair-", "server_group-")
PHASES = ("error", "end", "start")
#: Keys of free-form maps of the user or of an image.
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
def read_sample(path: Path) -> Any:
    """Return a sample with resolved references."""
    return _resolve(json.loads(path.read_text()), path.parent)


def _resolve(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_resolve(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    own = {key: _resolve(item, folder) for key, item in value.items() if key != "$ref"}
    if "$ref" not in value:
        return own
    name = value["$ref"].removesuffix("#")
    source = next(
        path for path in (folder / name, folder / "common_payloads" / name) if path.exists()
    )
    return _merge(read_sample(source), own)


def _merge(base: Any, own: Any) -> Any:
    if isinstance(base, dict) and isinstance(own, dict):
        return base | {key: _merge(base.get(key), value) for key, value in own.items()}
    return own


def sample_of(event: str, folder: Path) -> Any:
    """Return the event's own sample, or that of another phase of the action."""
    *words, _phase = event.split(".")
    stem = "-".join(words)
    names = [f"{event.replace('.', '-')}.json", *(f"{stem}-{other}.json" for other in PHASES)]
    return next((read_sample(folder / name) for name in names if (folder / name).exists()), None)


def differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Yield each difference that breaks a reader of Nova's format.

    null matches every type, because a sample cannot show the other types of a nullable value.
    """
    if ours is None or theirs is None:
        return
    if kind(ours) != kind(theirs):
        yield f"{path} is {kind(ours)}, not {kind(theirs)}"
    elif isinstance(ours, list) and theirs:
        for item in ours:
            yield from differences(item, theirs[0], f"{path}[]")
    elif isinstance(ours, dict) and path.rpartition(".")[2] not in FREE:
        if ours.get("nova_object.name") in FREE_OBJECTS:
            ours, theirs = (payload | {"nova_object.data": {}} for payload in (ours, theirs))
        for name in ("nova_object.name", "nova_object.version", "nova_object.namespace"):
            if ours.get(name) != theirs.get(name):
                yield f"{path} has {name} {ours.get(name)}, not {theirs.get(name)}"
        for key in sorted(ours.keys() ^ theirs.keys()):
            yield f"{path}.{key} is {'new' if key in ours else 'missing'}"
        for key in ours.keys() & theirs.keys():
            yield from differences(
                ours[key], theirs[key], f"{path}.{key}" if key != "nova_object.data" else path
            )


def kind(value: Any) -> str:
    return "number" if isinstance(value, float) else type(value).__name__


def all_rows() -> list[Any]:
    """Return the notifications of every workflow, successful and with each verb failing."""
    rows = []
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
            rows += read_outbox(cloud.store)
            cloud.store.close()
    return rows


def without_workflow() -> list[Any]:
    """Return the notifications outside workflows: the usage audit and live migration controls."""
    names = (
        "instance.exists",
        *(
            f"instance.live_migration_{control}.{phase}"
            for control in ("abort", "force_complete")
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
    return read_outbox(cloud.store)


def no_host() -> list[Any]:
    """Return the notifications of workflows without a valid host."""
    rows = []
    for workflow in ("create", "resize", "live_migrate"):
        time = Time()
        cloud = Cloud(memory_store(time), time)
        trial = trial_of(cloud, workflow)
        cloud.store.notify_with(NotificationSettings("api"))
        for name in cloud.hosts:
            cloud.force_down(name)
        trial.begin()
        cloud.settle()
        rows += read_outbox(cloud.store)
        cloud.store.close()
    return rows


def judge(rows: list[Any], folder: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Compare rows with the samples and return the seen events, and the differences by event."""
    events, wrong = set(), {}
    for row in rows:
        [message] = messages(row, VERSIONED)
        theirs = sample_of(message.event, folder)
        events.add(message.event)
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
    return events, wrong


@pytest.mark.slice("operations")
def test_server_notifications_match_nova_samples(samples: Path) -> None:
    events, wrong = judge(all_rows() + no_host() + without_workflow(), samples)
    count = sum((samples / f"{event.replace('.', '-')}.json").exists() for event in events)
    print(
        f"\n{len(events)} events of servers checked against Nova's samples, {count} of them have one of their own; "
        f"{len(events) - len(wrong)} agree"
    )
    assert wrong == {}
    assert len(events) > 60


def test_notifications_not_about_servers_match_nova_samples(samples: Path) -> None:
    store = memory_store(Time())
    store.notify_with(NotificationSettings("api"))
    change_all_but_servers(store)
    events, wrong = judge(read_outbox(store), samples)
    print(
        f"\n{len(events)} other events checked against Nova's samples, {len(events) - len(wrong)} agree"
    )
    assert wrong == {}
    assert events == {
        path.stem.replace("-", ".")
        for path in samples.glob("*.json")
        if path.stem.startswith(OTHERS)
    }


def test_notification_differences_detect_changed_and_missing_keys(samples: Path) -> None:
    ours = read_sample(samples / "instance-create-end.json")["payload"]
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
