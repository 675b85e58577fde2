# SPDX-License-Identifier: Apache-2.0
"""``kilonova hosts``: the line of each host and the exit status.

The tests include the notes about hosts in ``status`` and ``doctor``.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.clock import SECOND
from common.domain.models import HostInventory
from common.rpc.host_messages import Refusals
from common.service.log import JsonFormatter, TextFormatter
from common.store import schema
from common.store.engine import Store
from common.store.hosts import host_keys, hosts, services
from deploy.operator.doctor.command import tell
from deploy.operator.main import main
from tests.schemas import upgrade
from tests.server_rows import server_row

HOST = HostInventory(
    "QEMU", 7002000, "", 4, 8192, 100, reserved_memory_mb=192, ratios={"VCPU": 4.0}
)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "kilonova.conf"
    path.write_text(
        f"[database]\nurl = sqlite:///{tmp_path}/k.db\n[scheduler]\nbuild_failure_limit = 3\n"
        "build_failure_pause = 100\n"
    )
    return path


@pytest.fixture
def store(tmp_path: Path) -> Any:
    new_store = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(new_store)
    for name in ("a", "b", "c"):
        new_store.write(lambda tx, name=name: hosts.register(tx, name, "boot", HOST))
        new_store.write(lambda tx, name=name: host_keys.ensure(tx, name))
    yield new_store
    new_store.close()


def change(store: Store, table: sa.Table, where: Any, **values: Any) -> None:
    with store.begin() as tx:
        tx.execute(sa.update(table).where(where).values(**values))


def read_json(
    conf: Path, capsys: pytest.CaptureFixture[str], status: int = 0
) -> dict[str, dict[str, Any]]:
    assert main(["--config", str(conf), "hosts", "--json"]) == status
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)}


def read_lines(conf: Path, capsys: pytest.CaptureFixture[str], status: int = 0) -> list[str]:
    assert main(["--config", str(conf), "hosts"]) == status
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_hosts_shows_free_and_total_resources_and_zone(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with store.begin() as tx:
        [provider] = tx.scalars(
            sa.select(schema.providers.c.id).where(schema.providers.c.host == "b")
        )
        tx.execute(
            sa.insert(schema.allocations),
            {
                "provider_id": provider,
                "consumer_id": "s",
                "resource_class": "MEMORY_MB",
                "used": 2048,
            },
        )
        tx.execute(
            sa.insert(schema.aggregates),
            {
                "id": 1,
                "uuid": "u",
                "name": "n",
                "created_at": 0,
                "updated_at": 0,
                "meta": {"availability_zone": "az1"},
            },
        )
        tx.execute(sa.insert(schema.aggregate_hosts), {"aggregate_id": 1, "host": "b"})
    rows_by_host = read_json(conf, capsys)
    assert {name: row["zone"] for name, row in rows_by_host.items()} == {
        "a": "nova",
        "b": "az1",
        "c": "nova",
    }
    assert rows_by_host["b"]["classes"]["MEMORY_MB"] == {"total": 8000, "used": 2048, "free": 5952}
    assert rows_by_host["a"]["facts"]["hypervisor_type"] == "QEMU"
    assert rows_by_host["a"]["classes"]["VCPU"] == {"total": 16, "used": 0, "free": 16}
    assert read_lines(conf, capsys) == [
        "host zone state servers DISK_GB free/total MEMORY_MB free/total VCPU free/total",
        "a nova up 0 100/100 8000/8000 16/16",
        "b az1 up 0 100/100 5952/8000 16/16",
        "c nova up 0 100/100 8000/8000 16/16",
        "3 hosts, 3 of them take new servers",
    ]


def test_hosts_shows_why_host_accepts_no_servers(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    [uuid] = [row.uuid for row in store.read(services.list_all) if row.host == "a"]
    store.write(
        lambda tx: services.set_state(tx, uuid, disabled=True, disabled_reason="its fan is loud")
    )
    change(store, schema.heartbeats, schema.heartbeats.c.host == "b", up=False)
    change(store, schema.services, schema.services.c.host == "c", forced_down=True)
    rows_by_host = read_json(conf, capsys, status=1)
    assert [(row["state"], row["enabled"], row["open"]) for row in rows_by_host.values()] == [
        ("up", False, False),
        ("down", True, False),
        ("forced down", True, False),
    ]
    lines = read_lines(conf, capsys, status=1)
    assert "a nova up, disabled 0 " in lines[1] and lines[1].endswith(" its fan is loud")
    assert lines[-1] == "3 hosts, 0 of them take new servers"


def test_hosts_shows_pause_of_host_after_failed_builds(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    now = store.now()
    for name, failures, ago in (("a", 3, 60), ("b", 2, 1), ("c", 5, 101)):
        change(
            store,
            schema.providers,
            schema.providers.c.host == name,
            failures=failures,
            failed_at=now - ago * 1_000_000,
        )
    rows_by_host = read_json(conf, capsys)
    assert 35 <= rows_by_host["a"]["tried_again_in"] <= 40
    assert [(row["left_out"], row["open"]) for row in rows_by_host.values()] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    lines = read_lines(conf, capsys)
    assert "left out after 3 failed builds in a row, tried again in " in lines[1]
    assert "failed" not in lines[2]
    assert lines[3].endswith("5 builds failed in a row; the next server tries it")


def test_hosts_names_command_for_host_without_key(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every host is in this state after the upgrade that introduced keys."""
    store.write(lambda tx: host_keys.remove(tx, "b"))
    assert [row["has_key"] for row in read_json(conf, capsys).values()] == [True, False, True]
    lines = read_lines(conf, capsys)
    assert lines[2].endswith("so conductors refuse its messages: kilonova host add b")
    assert "key" not in lines[1]


def test_hosts_of_cloud_without_hosts_fails(
    conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = Store(f"sqlite:///{tmp_path}/k.db")
    upgrade(empty)
    empty.close()
    assert read_lines(conf, capsys, status=1)[-1] == "0 hosts, 0 of them take new servers"


def fail_build(store: Store, host: str, image: str | None, cause: str, ago: int = 60) -> None:
    """Write a server with a failed build on the host ``ago`` seconds ago."""
    server, action, at = ids.new(), ids.new(), store.now() - ago * 1_000_000
    with store.begin() as tx:
        tx.execute(
            sa.insert(schema.servers).values(
                **server_row(
                    server, vm_state="error", fence=1, image_id=image, created_at=at, updated_at=at
                )
            )
        )
        tx.execute(
            sa.insert(schema.actions).values(
                id=action,
                server_id=server,
                project_id="p",
                user_id="u",
                request_id="r",
                name="create",
                workflow="create",
                version=1,
                args={},
                fence=1,
                state="failed",
                data={},
                created_at=at,
                updated_at=at,
            )
        )
        tx.execute(
            sa.insert(schema.events).values(
                action_id=action,
                seq=1,
                step="build",
                attempt=1,
                event="failed",
                host=host,
                message=cause,
                at=at,
            )
        )


def test_hosts_lists_failed_builds_of_last_hour_with_causes(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    image, another = ids.new(), ids.new()
    for host in ("a", "a", "b"):
        fail_build(store, host, image, "The image is damaged.")
    fail_build(store, "a", another, "The disk is full.")
    fail_build(store, "c", another, "That was long ago.", ago=3700)
    rows_by_host = read_json(conf, capsys)
    assert [
        sum(build["builds"] for build in row["failed_builds"]) for row in rows_by_host.values()
    ] == [
        3,
        1,
        0,
    ]
    assert rows_by_host["b"]["failed_builds"] == [
        {"host": "b", "image": image, "cause": "The image is damaged.", "builds": 1}
    ]
    lines = read_lines(conf, capsys)
    assert lines[1].endswith(
        "3 builds failed there in the last hour: 2 times: The image is damaged.; The disk is full."
    )
    assert lines[2].endswith("1 builds failed there in the last hour: The image is damaged.")
    assert "failed" not in lines[3]
    assert lines[4:] == [
        f"image {image}: 3 builds failed on 2 of the hosts in the last hour: "
        "3 times: The image is damaged.",
        "3 hosts, 3 of them take new servers",
    ]


def test_hosts_shows_refused_messages_of_host_for_an_hour(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (5, 7):
        store.write(lambda tx, n=number: hosts.note_refusals(tx, {"b": n, "made-up": 1}))
    row = read_json(conf, capsys)["b"]
    assert (row["refused_messages"], row["refused_ago"] < 60) == (12, True)
    [line] = [line for line in read_lines(conf, capsys) if line.startswith("b ")]
    assert "refused in its name: 12 messages, the last one" in line
    change(store, schema.hosts, schema.hosts.c.name == "b", refused_at=1)
    assert not any("refused" in line for line in read_lines(conf, capsys))


def silence(store: Store, *hosts: str, minutes: int = 3) -> None:
    beats = schema.heartbeats
    with store.begin() as tx:
        for host in hosts:
            tx.execute(
                sa.update(beats)
                .where(beats.c.host == host)
                .values(seen_at=beats.c.seen_at - minutes * 60 * SECOND)
            )


def test_hosts_shows_reason_for_silent_host_counted_as_up(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    silence(store, "b")
    [line] = [line for line in read_lines(conf, capsys) if line.startswith("b ")]
    assert " unknown " in line and "last heard 18" in line
    assert "no conductor has declared it down yet" in line
    assert not any("heard" in line for line in read_lines(conf, capsys) if line.startswith("a "))
    silence(store, "a", "c")
    assert all(
        "not declared down, because only 0 of 3 hosts are heard" in line
        for line in read_lines(conf, capsys, status=1)[1:4]
    )


def test_status_shows_silent_host_counted_as_up(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(conf), "status"]) == 0
    assert "last heard" not in capsys.readouterr().out
    silence(store, "a", "b", "c")
    assert main(["--config", str(conf), "status"]) == 1
    shown = [line for line in capsys.readouterr().out.splitlines() if "nova-compute" in line]
    assert len(shown) == 3 and all(" unknown " in line for line in shown)
    assert all("not declared down, because only 0 of 3 hosts are heard" in line for line in shown)


def test_hosts_and_doctor_show_hypervisor_name_used_by_another_host(
    conf: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    thief = replace(HOST, hypervisor_hostname="a")
    store.write(lambda tx: hosts.register(tx, "b", "boot", thief))
    [line] = [line for line in read_lines(conf, capsys) if line.startswith("b ")]
    text = "it reports the hypervisor name a, which another host has, and is shown as b"
    assert line.endswith(text)
    main(["--config", str(conf), "doctor", "--no-hosts"])
    assert f"host b: {text}\n    next    give one of the two" in capsys.readouterr().out


def test_doctor_shows_refused_messages_and_the_next_step(
    store: Store, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    tell(store, [], as_json=False)
    assert capsys.readouterr().out == "all is well\n"
    Refusals().count("b", "the message is malformed")
    store.write(lambda tx: hosts.note_refusals(tx, {"b": 12}))
    tell(store, [], as_json=False)
    first, following, last = capsys.readouterr().out.splitlines()
    assert first.startswith("host b: refused in its name: 12 messages, the last one 0 s ago")
    assert "kilonova host rotate b" in following and "kilonova host remove b" in following
    pattern = following.split("'")[1]
    for form in (TextFormatter(), JsonFormatter()):
        assert re.search(pattern, form.format(caplog.records[-1]))
    assert last == "nothing found"
    change(store, schema.hosts, schema.hosts.c.name == "b", refused_at=1)
    tell(store, [], as_json=False)
    assert capsys.readouterr().out == "all is well\n"
