# SPDX-License-Identifier: Apache-2.0
"""How the cells of tier 2 are played: a guest of a lab that goes from cell to cell, and what is
looked at after each.

A cell's guest is the one that survived the cell before; another is made when it has gone. It is
brought to the status in which the workflow begins, which is asked for and struck (strikes.py).
Must stay true: ``Stage.play`` raises unless everything holds that test_tier_two.py promises.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deploy.one_machine.cloud import process_control
from deploy.one_machine.cloud.process_control import find_process
from deploy.one_machine.connectivity import KEY, PRIVATE
from deploy.one_machine.machine.underlay import NAMESPACES
from tests.e2e.guests import PATIENT, TESTIMONY, Witness, give_address
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, SETTLE, Reply, Rest
from tests.e2e.strikes import OVER, Strikes, Struck, await_back, await_cleanups
from tests.e2e.test_volume_kills import is_free
from tests.e2e.tier_two import NAME, Cell, Fault, Holds, Who, point_of_no_return
from tests.e2e.tier_two_actions import BACK, HOW, THERE, How
from tests.e2e.watcher import identify, server_of
from tests.waiting import await_true

#: MiB at which a witness has its noise, and bytes of it that are read.
NOISE_AT, NOISE = 65, 65536
#: Seconds in which the doctor's findings must have gone by themselves.
CALM = 90
#: Where a status is kept (tier_two.KEEPING) that otherwise is passed.
KEPT = {"SHELVED_OFFLOADED": ("SHELVED",)}


@dataclass
class Stage:
    """The lab, its guest, and whose canary it has. ``there``: where its next move goes; ``known``:
    the doctor's findings that a cell before has left."""

    lab: LiveLab
    guest: Witness | None = None
    canary: str = ""
    there: str = ""
    known: set[str] = field(default_factory=set)
    volumes: list[str] = field(default_factory=list)
    struck: tuple[str, int | None] = ("", None)

    # --- the guest ---
    @property
    def rest(self) -> Rest:
        return self.lab.rest("kilonova-admin")

    @property
    def server(self) -> str:
        assert self.guest is not None
        return self.guest.server

    @property
    def path(self) -> str:
        return f"/servers/{self.server}"

    def order(self, name: str) -> str:
        """The id of a server that was asked for, which will be a witness."""
        network = next(iter(self.lab.seed.demo.network.networks(name=PRIVATE)))
        return self.lab.rest().create(
            image=self.lab.image(),
            flavor=self.lab.flavor(),
            name=name,
            networks=[{"uuid": network.id}],
            key_name=KEY,
            user_data=base64.b64encode(TESTIMONY).decode(),
        )

    def receive(self, server: str, name: str) -> None:
        """It is there: the next cells are its own. Nobody waits until it has booted."""
        self.rest.await_status(server, "ACTIVE")
        self.guest = Witness(self.lab, server, name, give_address(self.lab, server))
        self.canary = ""

    def renew(self) -> None:
        """Another guest, if there is none."""
        if self.guest is None:
            name = f"{NAME}-{uuid.uuid4().hex[:6]}"
            self.receive(self.order(name), name)

    def remove(self) -> None:
        """The guest goes, and nothing of it stays."""
        if self.guest is not None:
            guest, self.guest = self.guest, None
            path = f"/servers/{guest.server}"
            self.rest.insist("POST", f"{path}/action", {"forceDelete": None}, expected=(202, 404))
            self.is_gone(guest)

    def is_gone(self, guest: Witness) -> None:
        """Nothing of it stays: its domain, records, files, volumes, nor half an image."""
        guest.rest.await_gone(guest.server)
        self.lab.await_removed(guest.server, SETTLE)
        network = self.lab.seed.demo.network
        for found in network.ips(floating_ip_address=guest.floating):
            network.delete_ip(found)
        for volume in self.volumes:
            await_true(lambda one=volume: is_free(self.lab, one), SETTLE, f"{volume} is free")  # type: ignore[misc]  # bound here
        await_true(lambda: set(self.lab.images().values()) <= {"active"}, SETTLE, self.lab.images)
        self.tidy()

    def tidy(self) -> None:
        """The images that cells have made go."""
        for image in self.lab.seed.demo.image.images(visibility="private"):
            if image.name.startswith(NAME) and not image.name.endswith("-shelved"):
                self.lab.seed.demo.image.delete_image(image)

    def status(self) -> str:
        """Its status, when nothing is in hand."""
        await_true(
            lambda: (
                self.rest.server(self.server)["OS-EXT-STS:task_state"] is None and self._is_calm()
            ),
            SETTLE,
            lambda: self.rest.server(self.server),
        )
        return str(self.rest.server(self.server)["status"])

    def _is_calm(self) -> bool:
        query = "SELECT state FROM actions WHERE server_id = ?"
        return all(row[0] in OVER for row in self.lab.rows(query, self.server))

    def boot(self) -> None:
        """Its guest is up, and its canary known."""
        assert self.guest is not None
        self.guest.await_ssh(3 * BOOT, PATIENT)
        if not self.canary:
            self.guest.account()
            [self.canary] = self.noise()

    def noise(self) -> list[str]:
        """What is on its disks, where witnesses write theirs; nothing where it has no disk."""
        host = self.rest.server(self.server)["OS-EXT-SRV-ATTR:host"]
        if host is None:
            return []
        listed = self.lab.virsh(
            "domblklist", self.server, "--details", host=self.lab.lab.number(host)
        )
        disks = [line.split() for line in listed.splitlines()]
        return [noise(row[3]) for row in disks if row[1:2] == ["disk"] and row[3].startswith("/")]

    # --- what is asked for ---
    def act(self, key: str, value: object = None, expected: int = 202) -> Reply:
        reply = self.rest.act(self.server, key, value)
        assert reply.status == expected, reply
        return reply

    def call(self, method: str, path: str, body: object = None) -> Reply:
        """What the API may answer late, whose waiting a kill has ended."""
        reply = self.rest.call(method, self.path + path, body)
        assert reply.status in (200, 202, 204, 503, 504), reply
        return reply

    def does(self, workflow: str) -> None:
        """Do it without a fault, on the way to a cell."""
        how = self.ready(workflow)
        step = point_of_no_return(workflow).name
        ended = self.at_step(workflow, step, lambda host: None)
        assert ended.state == "done", (workflow, ended)
        self.status()
        if how.wipes:
            self.canary = ""

    def go_to(self, wanted: str) -> None:
        """To a status, by way of ACTIVE."""
        while (found := self.status()) != wanted:
            assert found in BACK or found == "ACTIVE", self.rest.server(self.server)
            self.does(BACK[found] if found != "ACTIVE" else THERE[wanted])

    def ready(self, workflow: str) -> How:
        """It can be asked for."""
        how = HOW[workflow]
        self.go_to(how.begins)
        how.before(self)
        if how.powers_off:
            self.boot()
        place = self.lab.host_of(self.server)
        if place in self.lab.cloud.hosts:
            self.there = next(host for host in self.lab.cloud.hosts if host != place)
        return how

    def at_step(self, workflow: str, step: str, blow: Callable[[str | None], object]) -> Struck:
        ask = partial(HOW[workflow].ask, self)
        return Strikes(self.lab, self.server).at_step(workflow, step, blow, ask)

    # --- blows ---
    def blow(self, cell: Cell, host: str | None) -> None:
        """What the cell says, at the host that the journal names."""
        here = host or self.lab.host_of(self.server)
        if cell.fault is Fault.DELETE:
            self.lab.rest().insist("DELETE", self.path, expected=(204, 404))
        if cell.fault is Fault.RETURN:
            self.lab.strike("start", self.there)
        if cell.fault is not Fault.KILL:
            return
        if cell.who in (Who.GUEST, Who.GUEST_THERE, Who.LIBVIRTD, Who.LIBVIRTD_THERE):
            where = self.there if cell.who in (Who.GUEST_THERE, Who.LIBVIRTD_THERE) else here
            is_guest = cell.who in (Who.GUEST, Who.GUEST_THERE)
            os.kill(self._process(where, self.server if is_guest else ""), signal.SIGKILL)
            return
        name = str(cell.who)
        if cell.who in (Who.AGENT, Who.AGENT_THERE):
            name = agent(self.lab, here if cell.who is Who.AGENT else self.there)
        self.struck = name, find_process(self.lab.cloud, name)
        process_control.kill(self.lab.cloud, name)

    def _process(self, host: str, server: str) -> int:
        """The number of a host's libvirtd, or of the QEMU of a server there, once it is there."""
        number = self.lab.lab.number(host)
        space = identify(NAMESPACES / f"{self.lab.cloud.underlay.namespace(number)}")

        def found() -> list[int]:
            return [
                int(process.name)
                for process in Path("/proc").glob("[0-9]*")
                if identify(process / "ns/net") == space
                and (server_of(process) == server if server else is_libvirtd(process))
            ]

        return int(await_true(found, 30, f"no process of {host}", pause=0.005)[0])

    # --- what must hold ---
    def play(self, cell: Cell) -> str:
        """One cell; returns its story in a line."""
        self.struck = "", None
        blow = partial(self.blow, cell)
        if cell.workflow == "create":
            self.remove()
            name = f"{NAME}-{uuid.uuid4().hex[:6]}"
            server = self.order(name)
            self.guest = Witness(self.lab, server, name, "")
            strikes = Strikes(self.lab, server)
            ended = strikes.at_step("create", cell.step, blow, lambda: None, frozenset())
            if cell.holds is not Holds.GONE:
                self.receive(server, name)
        else:
            self.renew()
            how = self.ready(cell.workflow)
            ended = self.at_step(cell.workflow, cell.step, blow)
            if how.wipes:
                self.canary = ""
        return self.judge(cell, ended)

    def judge(self, cell: Cell, ended: Struck) -> str:
        """Everything that is promised of the cell holds; its story."""
        if self.struck[0]:
            await_back(self.lab, *self.struck)
        self.await_hosts()
        told = f"{cell.step} was {ended.seen}, {ended.state} after {ended.seconds:.1f} s"
        assert self.guest is not None
        if cell.holds is Holds.GONE or cell.workflow == "delete":
            wanted = "superseded" if cell.holds is Holds.GONE else "done"
            assert ended.state == wanted, ended
            guest, self.guest = self.guest, None
            self.is_gone(guest)
        elif ended.state == "failed" and cell.holds is Holds.ENDS:
            await_true(self.is_as_shown, SETTLE, self.story)
            await_cleanups(self.lab, self.server)
            found = self.status()
            self.does(cell.workflow)
            told += f" ({ended.message}); {found}, and done when asked for again"
        else:
            assert ended.state == "done", ended
        if self.guest is not None:
            wanted = HOW[cell.workflow].ends if cell.workflow in HOW else "ACTIVE"
            assert self.status() in (wanted, *KEPT.get(wanted, ())), self.rest.server(self.server)
            self.is_once()
            self.is_whole()
        self.is_well()
        self.tidy()
        return told

    def await_hosts(self) -> None:
        """Each libvirtd that should answer does."""
        for host in self.lab.cloud.hosts:
            if self.lab.lab.state(host) == "up":
                await_true(
                    lambda one=host: self.lab.lab.guests(one) is not None,  # type: ignore[misc]  # bound here
                    60,
                    f"libvirtd of {host} answers",
                )

    def is_as_shown(self) -> bool:
        """Does its host have it as the API shows it? A guest that died is soon shown as off."""
        shown = self.rest.server(self.server)
        runs = self.lab.find_domains(self.server).get(shown["OS-EXT-SRV-ATTR:host"]) == "running"
        return bool(runs == (shown["status"] == "ACTIVE"))

    def is_once(self) -> None:
        """By all hosts: one that is ACTIVE runs where the API says, and nowhere else; no other runs
        twice."""
        shown = self.rest.server(self.server)
        place = shown["OS-EXT-SRV-ATTR:host"]
        running = [
            host for host, state in self.lab.find_domains(self.server).items() if state == "running"
        ]
        if shown["status"] == "ACTIVE":
            await_true(
                lambda: self.lab.find_domains(self.server) == {place: "running"},
                SETTLE,
                lambda: (place, self.lab.find_domains(self.server)),
            )
        assert len(running) <= 1, running

    def is_whole(self) -> None:
        """Its canary is on its disk, as long as it has one."""
        if self.canary:
            found = self.noise()
            assert self.canary in found or not found, f"of {self.canary} there is {found}"

    def is_well(self) -> None:
        """The doctor finds nothing, or soon finds nothing more."""

        def findings() -> set[str]:
            said = self.lab.doctor()
            if "did not answer" in said.stderr:
                return {said.stderr}
            return {*said.stdout.splitlines()} - {"all is well"} - self.known

        await_true(lambda: not findings(), CALM, findings, pause=1)

    def recover(self) -> str:
        """After a cell that failed: the lab as it was, without its guest; what is left of that."""
        left = []
        for what in (self.lab.repair, self.remove):
            try:
                what()
            except Exception as problem:  # noqa: BLE001  # the next cell begins anew
                left.append(f"{type(problem).__name__}: {problem}"[:500])
        self.guest, self.volumes = None, []
        self.known |= {*self.lab.doctor().stdout.splitlines()} - {"all is well"}
        return "\n".join([*left, *sorted(self.known)])

    def story(self) -> str:
        """Of the guest at this moment, for a reader."""
        if self.guest is None:
            return ""
        query = "SELECT id, workflow, state, step, message FROM actions WHERE server_id = ? ORDER BY created_at"
        strikes = Strikes(self.lab, self.server)
        rows = [(*row, strikes.journal(row[0])) for row in self.lab.rows(query, self.server)[-3:]]
        shown = self.rest.server(self.server)
        facts = {key: shown.get(key) for key in ("status", "fault", "OS-EXT-SRV-ATTR:host")}
        lines = [f"{facts} {self.lab.find_domains(self.server)}", *map(str, rows)]
        return "\n".join([*lines, self.lab.doctor().stdout])


def agent(lab: LiveLab, host: str) -> str:
    """The name of a host's agent."""
    number = lab.lab.number(host)
    return "agent" if number == 1 else f"agent-{number}"


def is_libvirtd(process: Path) -> bool:
    try:
        return (process / "comm").read_text().strip() == "libvirtd"
    except OSError:  # it has ended
        return False


def noise(path: str) -> str:
    """A digest of what is on a disk at the place of a witness's noise; its guest may run."""
    said = subprocess.run(
        ["qemu-io", "-r", "-U", "-c", f"read -v {NOISE_AT}M {NOISE}", path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    lines = re.findall(r"^[0-9a-f]{8}:  .{47}", said, re.MULTILINE)
    assert len(lines) == NOISE // 16, said[-300:]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
