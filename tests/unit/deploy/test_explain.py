# SPDX-License-Identifier: Apache-2.0
"""``kilonova explain``: the request to the scheduler, the output, and the exit status.

The database is an SQLite file with three hosts. A test double answers for the scheduler.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from common.domain import errors, ids
from common.domain.models import Explanation, Flavor, HostInventory, ImageRef, RequestSpec
from common.domain.wire import to_wire
from common.store import schema
from common.store.engine import Store, now
from common.store.hosts import hosts
from common.store.servers import actions, servers
from common.store.tenants import server_groups
from deploy.operator.explain import explain
from deploy.operator.main import parser
from tests.schemas import upgrade

UNKNOWN = "5a0f7c1e-9d2b-4b8e-8a43-0c9d9a7f5b11"
FLAVOR = Flavor("42", "m1.small", 2, 2048, 20)
FITS = Explanation(
    total=3,
    passing=2,
    hosts=["b", "a"],
    room={"nova": 5, "az1": 7},
    removed=[{"hosts": 1, "text": "disabled"}],
    reason="3 hosts: 1 disabled",
    by_host={"c": "disabled"},
)
FULL = Explanation(
    total=3,
    passing=0,
    removed=[{"hosts": 2, "text": "disabled"}, {"hosts": 1, "text": "forced down"}],
    reason="3 hosts: 2 disabled, 1 forced down",
    by_host={"a": "disabled", "b": "disabled", "c": "forced down"},
)


class Cloud:
    """A database with hosts and a flavor, and a scheduler that returns ``answer``."""

    def __init__(self, folder: Path) -> None:
        self.conf = folder / "kilonova.conf"
        self.conf.write_text(f"[database]\nurl = sqlite:///{folder}/k.db\n")
        self.store = Store(f"sqlite:///{folder}/k.db")
        self.answer: Explanation | errors.Problem = FITS
        self.specs: list[RequestSpec] = []

    def prepare(self) -> None:
        """Write the tables, the hosts and the flavor."""
        upgrade(self.store)
        for name in ("a", "b", "c"):
            self.store.write(
                lambda tx, name=name: hosts.register(
                    tx, name, "boot", HostInventory("QEMU", 7002000, name + ".cloud", 4, 8192, 100)
                )
            )
        with self.store.begin() as tx:
            tx.execute(
                sa.insert(schema.flavors).values(created_at=now()),
                {
                    "flavorid": FLAVOR.id,
                    "name": FLAVOR.name,
                    "vcpus": 2,
                    "memory_mb": 2048,
                    "root_gb": 20,
                    "ephemeral_gb": 0,
                    "swap_mb": 0,
                    "is_public": False,
                    "extra_specs": {},
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

    def answer_spec(self, spec: RequestSpec) -> Explanation:
        self.specs.append(spec)
        if isinstance(self.answer, errors.Problem):
            raise self.answer
        return self.answer

    def run(self, *words: str) -> int:
        return explain(
            parser().parse_args(["--config", str(self.conf), "explain", *words]), self.answer_spec
        )

    # fmt: off
    def failed_server(self, **args: Any) -> str:
        """Write a server whose create failed, with a journal, and return the id of the server."""
        server, action = ids.new(), ids.new()
        row = {"id": server, "project_id": "p", "user_id": "u", "name": "web", "hostname": "web", "fence": 1,
               "action": None, "vm_state": "error", "task_state": None, "reservation_id": "r-1", "launch_index": 0,
               "image_id": "i", "image": to_wire(ImageRef("i", properties={"os_type": "linux"})),
               "flavor": to_wire(FLAVOR), "flavor_id": "42", "vcpus": 2, "memory_mb": 2048, "disk_gb": 20, "meta": {},
               "tags": [], "scheduler_hints": {"cidr": "/24"}, "security_groups": [],
               "pinned_availability_zone": args.get("zone")}
        self.store.write(lambda tx: servers.insert(tx, [row]))
        self.store.write(lambda tx: actions.insert(tx, [{
            "id": action, "server_id": server, "project_id": "p", "user_id": "u", "request_id": "req-1",
            "name": "create", "workflow": "create", "args": args, "fence": 1, "secrets": None}]))
        self.store.write(lambda tx: actions.append(tx, [
            {"action_id": action, "seq": seq, "step": step, "attempt": attempt, "event": event, "host": host,
             "message": message, "details": details, "at": 1_000_000}
            for seq, (step, attempt, event, host, message, details) in enumerate((
                ("place", 1, "succeeded", None, None, None),
                ("build", 1, "failed", "c", "The disk is full.", "qemu-img: no space\non /var"),
                ("place", 2, "failed", None, "No valid host was found. 3 hosts: 2 disabled, 1 excluded",
                 "a: disabled\nb: disabled")), 1)]))
        return server
    # fmt: on


@pytest.fixture(scope="module")
def database_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the database file of a prepared cloud. Each test copies the file."""
    new_cloud = Cloud(tmp_path_factory.mktemp("explain"))
    new_cloud.prepare()
    new_cloud.store.close()
    return new_cloud.conf.with_name("k.db")


@pytest.fixture
def cloud(tmp_path: Path, database_file: Path) -> Any:
    shutil.copy(database_file, tmp_path)
    new_cloud = Cloud(tmp_path)
    yield new_cloud
    new_cloud.store.close()


# --- a request without a server ---
def test_explain_prints_room_by_zone_and_whether_count_fits(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("--flavor", "m1.small", "--count", "12") == 0
    assert capsys.readouterr().out.splitlines() == [
        "needs 20 DISK_GB, 2048 MEMORY_MB, 2 VCPU",
        "3 hosts, 2 of them can take one",
        "      1  disabled",
        "         c: disabled",
        "room for 12 more, by zone:",
        "  az1   7",
        "  nova  5",
        "best first: b, a",
        "12 of them: yes",
    ]
    assert cloud.run("--flavor", "42", "--count", "13") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "13 of them: no"
    cloud.answer = FULL
    assert cloud.run("--flavor", "42") == 1
    output = capsys.readouterr().out.splitlines()
    assert output[1:4] == [
        "3 hosts, 0 of them can take one",
        "      2  disabled",
        "      1  forced down",
    ]
    assert output[-2:] == ["room for 0 more", "1 of them: no"]


def test_explain_with_json_prints_answer_and_request(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("--flavor", "42", "--count", "12", "--zone", "az1", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert (
        output["fits"],
        output["count"],
        output["room"],
        output["by_host"],
        output["hosts"],
    ) == (
        True,
        12,
        FITS.room,
        FITS.by_host,
        FITS.hosts,
    )
    assert output["request"]["resources"] == {"VCPU": 2, "MEMORY_MB": 2048, "DISK_GB": 20}
    assert output["request"]["availability_zone"] == "az1"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--zone", "az1"), {"availability_zone": "az1"}),
        (("--host", "a"), {"requested_host": "a"}),
        (("--zone", "nova:b"), {"availability_zone": "az1", "force_host": "b"}),
        (("--zone", ":b:b.cloud"), {"force_host": "b"}),
        (("--project", "p1"), {"project_id": "p1"}),
        (("--hint", "query=[]", "--hint", "cidr=/24"), {"hints": {"query": "[]", "cidr": "/24"}}),
    ],
)
def test_explain_options_become_fields_of_request(
    cloud: Cloud, words: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert cloud.run("--flavor", "42", *words) == 0
    [spec] = cloud.specs
    assert spec.flavor == FLAVOR and spec.resources["MEMORY_MB"] == 2048
    fields = ("availability_zone", "requested_host", "force_host", "project_id", "hints", "group")
    defaults: dict[str, Any] = {**dict.fromkeys(fields), "project_id": "", "hints": {}}
    assert {name: getattr(spec, name) for name in fields} == {**defaults, **expected}


def test_explain_group_sets_project_and_repeated_hint_becomes_list(cloud: Cloud) -> None:
    group = cloud.store.write(
        lambda tx: server_groups.create(
            tx, {"project_id": "p7", "user_id": "u", "name": "g", "policy": "affinity", "rules": {}}
        )
    ).id
    first_id, second_id = ids.new(), ids.new()
    assert (
        cloud.run(
            "--flavor",
            "42",
            "--group",
            group,
            "--hint",
            f"same_host={first_id}",
            "--hint",
            f"same_host={second_id}",
        )
        == 0
    )
    [spec] = cloud.specs
    assert (spec.group, spec.project_id) == (group, "p7")
    assert spec.hints == {"group": group, "same_host": [first_id, second_id]}


def test_explain_affinity_group_is_limited_to_roomiest_host(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {
        policy: cloud.store.write(
            lambda tx, policy=policy: server_groups.create(
                tx, {"project_id": "p7", "user_id": "u", "name": "g", "policy": policy, "rules": {}}
            )
        ).id
        for policy in ("affinity", "soft-affinity")
    }
    status = {
        (policy, count): cloud.run("--flavor", "42", "--group", group, "--count", str(count))
        for policy, group in groups.items()
        for count in (7, 8, 12)
    }
    assert [case for case, number in status.items() if number] == [
        ("affinity", 8),
        ("affinity", 12),
    ]
    assert "room for 7 more on one host, by zone:" in capsys.readouterr().out


def test_explain_without_zone_uses_default_schedule_zone(cloud: Cloud) -> None:
    cloud.conf.write_text(cloud.conf.read_text() + "[scheduler]\ndefault_schedule_zone = az1\n")
    assert cloud.run("--flavor", "42") == 0
    assert cloud.specs[0].availability_zone == "az1"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((), "--flavor"),
        (("--flavor", "moon"), "--flavor"),
        (("--flavor", "42", "--count", "0"), "--count"),
        (("--flavor", "42", "--zone", "moon"), "--zone"),
        (("--flavor", "42", "--zone", "a:b:c:d"), "--zone"),
        (("--flavor", "42", "--zone", "nova:moon"), "--zone"),
        (("--flavor", "42", "--host", "moon"), "--host"),
        (("--flavor", "42", "--zone", "nova:a", "--host", "a"), "--host"),
        (("--flavor", "42", "--hint", "a"), "--hint"),
        (("--flavor", "42", "--hint", "same_host=a", "--hint", "same_host=b"), "--hint"),
        (("--flavor", "42", "--hint", "_x=1"), "--hint"),
        (("--flavor", "42", "--group", "moon"), "--group"),
        (("--flavor", "42", "--group", UNKNOWN), "--group"),
        (("moon",), "SERVER"),
        ((UNKNOWN,), "SERVER"),
        (("web", "--zone", "nova"), "--zone"),
        (("web", "--flavor", "42"), "--flavor"),
    ],
    ids=" ".join,
)
def test_explain_names_wrong_option_and_sends_no_request(
    cloud: Cloud, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], option: str
) -> None:
    assert cloud.run(*words) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(f"kilonova: {option}: "), output.err
    assert cloud.specs == []


def test_explain_with_count_not_a_number_exits_with_2(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cloud.run("--flavor", "42", "--count", "many")
    assert exit_info.value.code == 2
    assert "--count" in capsys.readouterr().err


def test_explain_without_scheduler_returns_3(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.answer = errors.NoAnswer("No scheduler answers.")
    assert cloud.run("--flavor", "42") == 3
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "kilonova: No scheduler answers.\n")


def test_explain_without_database_returns_3(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql+psycopg://kilonova@127.0.0.1:1/kilonova"
    cloud.conf.write_text(f"[database]\nurl = {url}\n[tls]\nallow_plain_text = true\n")
    assert cloud.run("--flavor", "42") == 3
    assert capsys.readouterr().err.startswith("kilonova: ")


# --- an existing server ---
def test_explain_server_prints_failures_and_current_answer(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    server = cloud.failed_server(zone="az1", host=None, forced=False)
    assert cloud.run(server) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[:9] == [
        f"server {server} (web) of project p: error, on no host",
        output[1],
        "  build, attempt 1, on c: The disk is full.",
        "      qemu-img: no space",
        "      on /var",
        "  place, attempt 2: No valid host was found. 3 hosts: 2 disabled, 1 excluded",
        "      a: disabled",
        "      b: disabled",
        "",
    ]
    assert output[1].startswith("create of ") and output[1].endswith("(req-1):")
    assert output[9] == "a server like it now:" and output[-1] == "1 of them: yes"
    [spec] = cloud.specs
    assert (spec.server, spec.availability_zone, spec.force_host, spec.requested_host) == (
        server,
        "az1",
        None,
        None,
    )
    assert (spec.image_properties, spec.hints) == ({"os_type": "linux"}, {"cidr": "/24"})


@pytest.mark.parametrize(("forced", "expected"), [(True, ("a", None)), (False, (None, "a"))])
def test_explain_server_requests_its_host_again(cloud: Cloud, forced: bool, expected: Any) -> None:
    cloud.failed_server(zone=None, host="a", forced=forced)
    assert cloud.run("web") == 0
    assert (cloud.specs[0].force_host, cloud.specs[0].requested_host) == expected


def test_explain_server_with_json_prints_failures(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    server = cloud.failed_server(zone=None, host=None, forced=False)
    cloud.answer = FULL
    assert cloud.run("web", "--json") == 1
    output = json.loads(capsys.readouterr().out)["server"]
    assert (output["id"], output["action"], output["vm_state"]) == (server, "create", "error")
    assert [
        (failure["step"], failure["attempt"], failure["host"]) for failure in output["failures"]
    ] == [
        ("build", 1, "c"),
        ("place", 2, None),
    ]
    assert output["failures"][1]["details"] == "a: disabled\nb: disabled"


def test_explain_with_ambiguous_server_name_asks_for_id(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [cloud.failed_server() for _ in range(2)]
    assert cloud.run("web") == 2
    assert "several servers have the name web; give the id of the server" in capsys.readouterr().err
    assert cloud.run(both[0]) == 0


def test_explain_server_prints_failures_when_no_scheduler_answers(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.answer = errors.NoAnswer("No scheduler answers.")
    assert cloud.run(cloud.failed_server()) == 3
    assert "No valid host was found. 3 hosts" in capsys.readouterr().out
