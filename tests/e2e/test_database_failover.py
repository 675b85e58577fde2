# SPDX-License-Identifier: Apache-2.0
"""The database loses commits: its stand-by takes over without the last ones, or it is set back to a
dump.

Without anybody's hand nothing is stuck, nothing runs twice, and what the database still knows goes
on. What it has forgotten is kept, and the doctor names it.
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


def running(live: Live) -> dict[str, list[str]]:
    """Server -> hosts where it runs, by what the hosts keep."""
    found: dict[str, list[str]] = {}
    for number, host in enumerate(live.cloud.hosts, 1):
        guests = dict(StateFile(live.cloud.state_folder(number) / "memory-guests.json").read())
        for server, guest in guests.items():
            if (
                isinstance(guest, MemoryGuest)
                and not server.startswith(FILES)
                and guest.power_state == RUNNING
            ):
                found.setdefault(server, []).append(host)
    return found


def findings(live: Live) -> set[tuple[str, str]]:
    """What the doctor finds: invariant and server."""
    said = live.doctor()
    assert said.stderr == "", said
    lines = [line.split(": ") for line in said.stdout.splitlines() if not line.startswith(" ")]
    return {(line[0], line[1]) for line in lines if len(line) > 2}


@dataclass
class Past:
    """Servers, named for what becomes of them before the database loses what came ``after`` some
    moment."""

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
        self.rest.insist("DELETE", f"/servers/{self.servers[name]}", fine=(204,))

    def second_host(self, takes_servers: bool) -> None:
        compute = self.live.seed.admin.compute
        [service] = compute.services(binary="nova-compute", host=self.live.cloud.hosts[1])
        (compute.enable_service if takes_servers else compute.disable_service)(service)

    def are(self, status: str, *names: str) -> None:
        for name in names:
            self.rest.await_status(self.servers[name], status, SETTLE)

    def begin(self) -> None:
        """What is known for ever, and what is in hand when the moment comes."""
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
        self.are("ACTIVE", *self.servers)
        self.ask("started", "os-stop")
        self.are("SHUTOFF", "started")
        self.second_host(takes_servers=False)  # so that the next one gets the same place again
        self.create("coming")
        self.ask("stopping", "os-stop")
        self.delete("leaving")

    def after(self) -> None:
        """What is forgotten, although hosts have done it; the last of it they are doing."""
        self.create("lost", "unwanted")
        self.are("ACTIVE", "coming", "lost", "unwanted")
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
        self.are("ACTIVE", "started", "migrated")
        self.are("SHUTOFF", "stopped", "stopping")
        self.are("VERIFY_RESIZE", "resized")
        for name in ("deleted", "leaving"):
            self.rest.await_gone(self.servers[name])
        self.ask("struck", "os-stop")

    def known(self, kind: str, *names: str) -> set[tuple[str, str]]:
        return {(kind, self.servers[name]) for name in names}

    def heals(self) -> None:
        """Everything that the database knows goes on; the doctor finds what it does not know, and
        nothing else."""
        forgotten = self.known(WITHOUT_RECORD, "lost", "unwanted", "resized", "migrated")
        gone = self.known(WITHOUT_DOMAIN, "deleted", "migrated")
        self.await_findings(forgotten | gone)
        self.are("SHUTOFF", "stopped", "stopping", "resized")
        self.are("ACTIVE", "idle", "started", "coming")
        self.rest.await_gone(self.servers["leaving"])
        assert self.rest.server(self.servers["lost"]) == {}
        assert running(self.live)[self.servers["lost"]]
        assert self.servers["migrated"] not in running(self.live)

    def repaired(self) -> None:
        """Each finding's remedy."""
        adopting(self.live, self.servers["lost"])
        adopting(self.live, self.servers["migrated"])
        self.are("ACTIVE", "lost")
        self.are("SHUTOFF", "migrated")
        assert self.rest.server(self.servers["lost"])["name"] == "lost"
        refused = self.live.kilonova(*remedy(self.live, self.servers["resized"]))
        assert (refused.returncode, "--replace" in refused.stderr) == (1, True), refused
        adopting(self.live, self.servers["resized"], "--replace")
        self.are("SHUTOFF", "resized")
        assert self.rest.server(self.servers["resized"])["flavor"]["original_name"] == "m1.tiny"
        host = running(self.live)[self.servers["unwanted"]][0]
        for name, status in (("idle", 1), ("unwanted", 0)):
            answer = self.live.kilonova("host", "discard", host, self.servers[name], "--yes")
            assert answer.returncode == status, answer
        self.delete("deleted")
        self.rest.await_gone(self.servers["deleted"])
        self.await_findings(set())
        assert self.servers["unwanted"] not in running(self.live)

    def goes_on(self, repaired: tuple[str, ...] = ()) -> None:
        """Each server that has its guest is stopped, started, deleted; the others are deleted."""
        whole = ("idle", "stopping", "stopped", "started", "resized", "struck", "coming", *repaired)
        for key, status in (("os-start", "ACTIVE"), ("os-stop", "SHUTOFF"), ("os-start", "ACTIVE")):
            for name in whole:
                if self.rest.server(self.servers[name])["status"] != status:
                    self.ask(name, key)
            self.are(status, *whole)
        hosts = running(self.live)
        assert {name: len(hosts[self.servers[name]]) for name in whole} == dict.fromkeys(whole, 1)
        self.create("new")
        self.are("ACTIVE", "new")
        others = () if repaired else ("deleted", "migrated")
        for name in (*whole, *others, "new"):
            self.delete(name)
        for name in (*whole, *others, "new"):
            self.rest.await_gone(self.servers[name])
        left = () if repaired else ("lost", "unwanted", "resized", "migrated")
        self.await_findings(self.known(WITHOUT_RECORD, *left))

    def await_findings(self, wanted: set[tuple[str, str]]) -> None:
        await_true(
            lambda: findings(self.live) == wanted,
            SETTLE,
            lambda: (findings(self.live) ^ wanted, self.servers),
        )


@pytest.mark.slice("operations")
def test_a_stand_by_without_the_last_commits_takes_over() -> None:
    with with_stand_by() as pair:
        past = Past(pair.live)
        past.begin()
        pair.part()
        past.after()
        pair.fail_over()
        past.heals()
        past.goes_on()


def remedy(live: Live, server: str) -> list[str]:
    """How a guest is adopted, as the doctor says."""
    lines = live.doctor().stdout.splitlines()
    [line] = [line for line in lines if line.startswith(f"{WITHOUT_RECORD}: {server}")]
    [command] = re.findall(rf"kilonova (host adopt \S+ {server})", line)
    return str(command).split()


def adopting(live: Live, server: str, *options: str) -> None:
    """First it is shown, then written."""
    words = [*remedy(live, server), *options]
    shown = live.kilonova(*words)
    assert (shown.returncode, server in shown.stdout) == (1, True), shown
    done = live.kilonova(*words, "--yes")
    assert done.returncode == 0, done


@pytest.mark.slice("operations")
def test_all_goes_on_while_a_database_is_set_back() -> None:
    with with_dumps("mariadb") as database:
        past = Past(database.live)
        past.begin()
        database.dump()
        past.after()
        database.set_back_while_all_runs()
        past.heals()
        past.goes_on()


@pytest.mark.slice("operations")
@pytest.mark.parametrize(
    ("kind", "agents"), [("postgresql", ()), ("mariadb", ("agent", "agent-2"))]
)
def test_a_backup_is_restored_as_the_page_says(kind: str, agents: tuple[str, ...]) -> None:
    """What is lost is named, and has a way back; then all is well. Whether agents go on, or some
    are started again meanwhile."""
    with with_dumps(kind) as database:
        past, live = Past(database.live), database.live
        past.begin()
        database.dump()
        past.after()
        stopped = database.stop()
        database.set_back()
        database.upgrade()
        for name in agents:
            process_control.restart(live.cloud, name)
        for name in stopped:
            process_control.start(live.cloud, name)
        past.heals()
        assert database.look() == {
            "status": 0,
            "doctor": 1,
            "action list --stuck": 0,
            "cleanup list": 0,
        }
        past.repaired()
        live.judge()
        past.goes_on(("lost", "migrated"))
        live.judge()
