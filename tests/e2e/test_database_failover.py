# SPDX-License-Identifier: Apache-2.0
"""The database loses commits: a stand-by takes over without them, or a dump is restored.

Without an operator, no action is stuck, no guest runs twice, and the recorded actions continue.
Guests without a record stay, and the doctor reports them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from compute_agent.virt.driver import RUNNING
from compute_agent.virt.memory.state.guest import MemoryGuest
from compute_agent.virt.memory.state.state_file import FILES, StateFile
from deploy.one_machine.cloud import process_control
from tests.e2e.failover import with_dumps, with_stand_by
from tests.e2e.live import SETTLE, Live, Rest
from tests.waiting import await_true

#: Findings of the doctor.
WITHOUT_RECORD, WITHOUT_DOMAIN = "domain-known", "guest-there"


def list_running_servers(live: Live) -> dict[str, list[str]]:
    """Return the hosts on which each server runs, as stored by the hosts."""
    hosts_by_server: dict[str, list[str]] = {}
    for number, host in enumerate(live.cloud.hosts, 1):
        guests = dict(StateFile(live.cloud.state_folder(number) / "memory-guests.json").read())
        for server, guest in guests.items():
            if (
                isinstance(guest, MemoryGuest)
                and not server.startswith(FILES)
                and guest.power_state == RUNNING
            ):
                hosts_by_server.setdefault(server, []).append(host)
    return hosts_by_server


def list_findings(live: Live) -> set[tuple[str, str]]:
    """Return the doctor's findings as (invariant, server)."""
    output = live.doctor()
    assert output.stderr == "", output
    lines = [line.split(": ") for line in output.stdout.splitlines() if not line.startswith(" ")]
    return {(line[0], line[1]) for line in lines if len(line) > 2}


@dataclass
class History:
    """Servers named after their actions, some of which the database loses later."""

    live: Live
    servers: dict[str, str] = field(default_factory=dict)
    rest: Rest = field(init=False)

    def __post_init__(self) -> None:
        self.rest = self.live.rest()

    def create(self, *names: str) -> None:
        image, flavor = self.live.image("empty"), self.live.flavor()
        self.servers |= {
            name: self.rest.create(image=image, flavor=flavor, name=name) for name in names
        }

    def ask(self, name: str, key: str, value: object = None, user: Rest | None = None) -> None:
        reply = (user or self.rest).act(self.servers[name], key, value)
        assert reply.status in (202, 204), reply

    def delete(self, name: str) -> None:
        self.rest.insist("DELETE", f"/servers/{self.servers[name]}", expected=(204,))

    def second_host(self, takes_servers: bool) -> None:
        compute = self.live.seed.admin.compute
        [service] = compute.services(binary="nova-compute", host=self.live.cloud.hosts[1])
        (compute.enable_service if takes_servers else compute.disable_service)(service)

    def await_statuses(self, status: str, *names: str) -> None:
        for name in names:
            self.rest.await_status(self.servers[name], status, SETTLE)

    def begin(self) -> None:
        """Create servers and begin actions that the database keeps."""
        self.create(
            "idle",
            "stopping",
            "leaving",
            "stopped",
            "started",
            "deleted",
            "resized",
            "migrated",
            "struck",
        )
        self.await_statuses("ACTIVE", *self.servers)
        self.ask("started", "os-stop")
        self.await_statuses("SHUTOFF", "started")
        # The next server must get the same host when its create is repeated.
        self.second_host(takes_servers=False)
        self.create("coming")
        self.ask("stopping", "os-stop")
        self.delete("leaving")

    def make_lost_changes(self) -> None:
        """Create servers and run actions that the database loses after the hosts executed them.

        The last action is still running.
        """
        self.create("lost", "unwanted")
        self.await_statuses("ACTIVE", "coming", "lost", "unwanted")
        self.second_host(takes_servers=True)
        self.ask("stopped", "os-stop")
        self.ask("started", "os-start")
        self.delete("deleted")
        self.ask("resized", "resize", {"flavorRef": self.live.flavor("m1.tiny")})
        self.ask(
            "migrated",
            "os-migrateLive",
            {"host": None, "block_migration": "auto"},
            self.live.rest("kilonova-admin"),
        )
        self.await_statuses("ACTIVE", "started", "migrated")
        self.await_statuses("SHUTOFF", "stopped", "stopping")
        self.await_statuses("VERIFY_RESIZE", "resized")
        for name in ("deleted", "leaving"):
            self.rest.await_gone(self.servers[name])
        self.ask("struck", "os-stop")

    def make_findings(self, kind: str, *names: str) -> set[tuple[str, str]]:
        return {(kind, self.servers[name]) for name in names}

    def check_recovery(self) -> None:
        """Check that recorded actions continue, and that the doctor finds only the lost changes."""
        forgotten = self.make_findings(WITHOUT_RECORD, "lost", "unwanted", "resized", "migrated")
        missing = self.make_findings(WITHOUT_DOMAIN, "deleted", "migrated")
        self.await_findings(forgotten | missing)
        self.await_statuses("SHUTOFF", "stopped", "stopping", "resized")
        self.await_statuses("ACTIVE", "idle", "started", "coming")
        self.rest.await_gone(self.servers["leaving"])
        assert self.rest.server(self.servers["lost"]) == {}
        assert list_running_servers(self.live)[self.servers["lost"]]
        assert self.servers["migrated"] not in list_running_servers(self.live)

    def repair_findings(self) -> None:
        """Apply the remedy of each finding."""
        adopt_guest(self.live, self.servers["lost"])
        adopt_guest(self.live, self.servers["migrated"])
        self.await_statuses("ACTIVE", "lost")
        self.await_statuses("SHUTOFF", "migrated")
        assert self.rest.server(self.servers["lost"])["name"] == "lost"
        refused = self.live.kilonova(*read_remedy(self.live, self.servers["resized"]))
        assert (refused.returncode, "--replace" in refused.stderr) == (1, True), refused
        adopt_guest(self.live, self.servers["resized"], "--replace")
        self.await_statuses("SHUTOFF", "resized")
        assert self.rest.server(self.servers["resized"])["flavor"]["original_name"] == "m1.tiny"
        host = list_running_servers(self.live)[self.servers["unwanted"]][0]
        for name, status in (("idle", 1), ("unwanted", 0)):
            answer = self.live.kilonova("host", "discard", host, self.servers[name], "--yes")
            assert answer.returncode == status, answer
        self.delete("deleted")
        self.rest.await_gone(self.servers["deleted"])
        self.await_findings(set())
        assert self.servers["unwanted"] not in list_running_servers(self.live)

    def check_servers_work(self, repaired_names: tuple[str, ...] = ()) -> None:
        """Stop, start and delete each server with a guest, and delete the other servers."""
        usable = (
            "idle",
            "stopping",
            "stopped",
            "started",
            "resized",
            "struck",
            "coming",
            *repaired_names,
        )
        for key, status in (("os-start", "ACTIVE"), ("os-stop", "SHUTOFF"), ("os-start", "ACTIVE")):
            for name in usable:
                if self.rest.server(self.servers[name])["status"] != status:
                    self.ask(name, key)
            self.await_statuses(status, *usable)
        hosts = list_running_servers(self.live)
        assert {name: len(hosts[self.servers[name]]) for name in usable} == dict.fromkeys(usable, 1)
        self.create("new")
        self.await_statuses("ACTIVE", "new")
        remaining_servers = () if repaired_names else ("deleted", "migrated")
        for name in (*usable, *remaining_servers, "new"):
            self.delete(name)
        for name in (*usable, *remaining_servers, "new"):
            self.rest.await_gone(self.servers[name])
        remaining = () if repaired_names else ("lost", "unwanted", "resized", "migrated")
        self.await_findings(self.make_findings(WITHOUT_RECORD, *remaining))

    def await_findings(self, expected: set[tuple[str, str]]) -> None:
        await_true(
            lambda: list_findings(self.live) == expected,
            SETTLE,
            lambda: (list_findings(self.live) ^ expected, self.servers),
        )


@pytest.mark.slice("operations")
def test_actions_continue_after_failover_to_stand_by_lacking_last_commits() -> None:
    with with_stand_by() as pair:
        history = History(pair.live)
        history.begin()
        pair.stop_replication()
        history.make_lost_changes()
        pair.fail_over()
        history.check_recovery()
        history.check_servers_work()


def read_remedy(live: Live, server: str) -> list[str]:
    """Return the command with which the doctor proposes to adopt a guest."""
    lines = live.doctor().stdout.splitlines()
    [line] = [line for line in lines if line.startswith(f"{WITHOUT_RECORD}: {server}")]
    [command] = re.findall(rf"kilonova (host adopt \S+ {server})", line)
    return str(command).split()


def adopt_guest(live: Live, server: str, *options: str) -> None:
    """Adopt a guest, first as a preview, then with ``--yes``."""
    words = [*read_remedy(live, server), *options]
    preview = live.kilonova(*words)
    assert (preview.returncode, server in preview.stdout) == (1, True), preview
    result = live.kilonova(*words, "--yes")
    assert result.returncode == 0, result


@pytest.mark.slice("operations")
def test_actions_continue_after_database_restore_while_cloud_runs() -> None:
    with with_dumps("mariadb") as database:
        history = History(database.live)
        history.begin()
        database.dump()
        history.make_lost_changes()
        database.restore_while_cloud_runs()
        history.check_recovery()
        history.check_servers_work()


@pytest.mark.slice("operations")
@pytest.mark.parametrize(
    ("kind", "agents"), [("postgresql", ()), ("mariadb", ("agent", "agent-2"))]
)
def test_remedies_of_doctor_repair_cloud_after_restore_of_older_backup(
    kind: str, agents: tuple[str, ...]
) -> None:
    """The doctor names the lost changes, and their remedies repair the cloud.

    ``agents`` are restarted before the other processes.
    """
    with with_dumps(kind) as database:
        history, live = History(database.live), database.live
        history.begin()
        database.dump()
        history.make_lost_changes()
        stopped_programs = database.stop()
        database.restore()
        database.upgrade()
        for name in agents:
            process_control.restart(live.cloud, name)
        for name in stopped_programs:
            process_control.start(live.cloud, name)
        history.check_recovery()
        assert database.run_checks() == {
            "status": 0,
            "doctor": 1,
            "action list --stuck": 0,
            "cleanup list": 0,
        }
        history.repair_findings()
        live.assert_healthy()
        history.check_servers_work(("lost", "migrated"))
        live.assert_healthy()
