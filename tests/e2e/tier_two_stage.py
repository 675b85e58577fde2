# SPDX-License-Identifier: Apache-2.0
"""The execution of the cells of tier 2 with one guest of a lab, and the checks after each cell.

A cell uses the guest of the cell before, or a new guest if that guest is deleted. The stage brings
the server to the begin status of the workflow, requests the action and strikes (strikes.py).

Invariant: ``Stage.play`` raises unless all conditions in the docstring of test_tier_two.py hold.
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
from tests.e2e.guests import MIGRATING_TESTIMONY, PATIENT, Witness, give_address
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT, SETTLE, Reply, Rest
from tests.e2e.strikes import OVER, StrikeOutcome, Strikes, await_back, await_cleanups
from tests.e2e.test_volume_kills import is_free
from tests.e2e.tier_two import NAME, Cell, Expectation, Fault, Victim, find_pivot
from tests.e2e.tier_two_actions import FROM_ACTIVE, RECIPES, TO_ACTIVE, Recipe
from tests.e2e.watcher import identify, server_of
from tests.waiting import await_true

#: Position of a witness's noise on its disk in MiB, and the number of bytes to read.
NOISE_AT, NOISE = 65, 65536
#: Seconds until the doctor must have no more findings.
CALM = 90
#: End status -> other statuses that are correct in a cloud that keeps servers (tier_two.KEEPING).
KEPT = {"SHELVED_OFFLOADED": ("SHELVED",)}


@dataclass
class Stage:
    """The lab and the current guest.

    Attributes:
        canary: Digest of the noise on the guest's disk, or "" if not read yet.
        destination: Destination of the next move, or the dead host of an evacuation.
        known: Findings of the doctor that earlier cells have left.
        volumes: The volume of the cells, if created.
        struck: Name and former pid of the killed process, or ("", None).
    """

    lab: LiveLab
    guest: Witness | None = None
    canary: str = ""
    destination: str = ""
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

    def request_server(self, name: str) -> str:
        """Request a server with the user data of a witness, and return the id."""
        network = next(iter(self.lab.seed.demo.network.networks(name=PRIVATE)))
        return self.lab.rest().create(
            image=self.lab.image(),
            flavor=self.lab.flavor(),
            name=name,
            networks=[{"uuid": network.id}],
            key_name=KEY,
            user_data=base64.b64encode(MIGRATING_TESTIMONY.encode()).decode(),
        )

    def use_server(self, server: str, name: str) -> None:
        """Wait until the server is ACTIVE. The next cells use this guest.

        The guest may not have booted yet.
        """
        self.rest.await_status(server, "ACTIVE")
        self.guest = Witness(self.lab, server, name, give_address(self.lab, server))
        self.canary = ""

    def ensure_guest(self) -> None:
        """Create a guest if the stage has no guest."""
        if self.guest is None:
            name = f"{NAME}-{uuid.uuid4().hex[:6]}"
            self.use_server(self.request_server(name), name)

    def remove(self) -> None:
        """Delete the guest and check for leftovers."""
        if self.guest is not None:
            guest, self.guest = self.guest, None
            path = f"/servers/{guest.server}"
            self.rest.insist("POST", f"{path}/action", {"forceDelete": None}, expected=(202, 404))
            self.await_removed(guest)

    def await_removed(self, guest: Witness) -> None:
        """Wait until the guest has no domain, records, files, attachments or incomplete images."""
        guest.rest.await_gone(guest.server)
        self.lab.await_removed(guest.server, SETTLE)
        network = self.lab.seed.demo.network
        for address in network.ips(floating_ip_address=guest.floating):
            network.delete_ip(address)
        for volume in self.volumes:
            await_true(lambda key=volume: is_free(self.lab, key), SETTLE, f"{volume} is free")  # type: ignore[misc]  # bound here
        await_true(lambda: set(self.lab.images().values()) <= {"active"}, SETTLE, self.lab.images)
        self.delete_images()

    def delete_images(self) -> None:
        """Delete the images of cells, except the images of shelved servers."""
        for image in self.lab.seed.demo.image.images(visibility="private"):
            if image.name.startswith(NAME) and not image.name.endswith("-shelved"):
                self.lab.seed.demo.image.delete_image(image)

    def await_idle(self) -> str:
        """Wait until no action of the server is open, and return the server's status."""
        await_true(
            lambda: (
                self.rest.server(self.server)["OS-EXT-STS:task_state"] is None and self._is_idle()
            ),
            SETTLE,
            lambda: self.rest.server(self.server),
        )
        return str(self.rest.server(self.server)["status"])

    def _is_idle(self) -> bool:
        query = "SELECT state FROM actions WHERE server_id = ?"
        return all(row[0] in OVER for row in self.lab.rows(query, self.server))

    def await_boot(self) -> None:
        """Wait until the guest answers by ssh, and read the canary if unknown."""
        assert self.guest is not None
        self.guest.await_ssh(3 * BOOT, PATIENT)
        if not self.canary:
            self.guest.read_state()
            [self.canary] = self.read_noise()

    def read_noise(self) -> list[str]:
        """Return the digest of the noise on each disk of the server.

        The list is empty if the server is on no host.
        """
        host = self.rest.server(self.server)["OS-EXT-SRV-ATTR:host"]
        if host is None:
            return []
        output = self.lab.virsh(
            "domblklist", self.server, "--details", host=self.lab.lab.number(host)
        )
        disks = [line.split() for line in output.splitlines()]
        return [
            digest_noise(row[3]) for row in disks if row[1:2] == ["disk"] and row[3].startswith("/")
        ]

    # --- requests ---
    def act(self, key: str, value: object = None, expected: int = 202) -> Reply:
        reply = self.rest.act(self.server, key, value)
        assert reply.status == expected, reply
        return reply

    def call(self, method: str, path: str, body: object = None) -> Reply:
        """Send a request below the server.

        The statuses 503 and 504 are accepted, because a kill may interrupt the API's wait.
        """
        reply = self.rest.call(method, self.path + path, body)
        assert reply.status in (200, 202, 204, 503, 504), reply
        return reply

    def run_workflow(self, workflow: str) -> None:
        """Run a workflow without a fault to prepare a cell."""
        recipe = self.prepare(workflow)
        step = find_pivot(workflow).name
        ended = self.at_step(workflow, step, lambda host: None)
        assert ended.state == "done", (workflow, ended)
        self.await_idle()
        if recipe.wipes:
            self.canary = ""

    def go_to(self, status: str) -> None:
        """Bring the server to a status, via ACTIVE if necessary."""
        while (current := self.await_idle()) != status:
            assert current in TO_ACTIVE or current == "ACTIVE", self.rest.server(self.server)
            self.run_workflow(TO_ACTIVE[current] if current != "ACTIVE" else FROM_ACTIVE[status])

    def prepare(self, workflow: str) -> Recipe:
        """Create the preconditions of a workflow."""
        recipe = RECIPES[workflow]
        self.go_to(recipe.begin_status)
        recipe.prepare(self)
        if recipe.powers_off:
            self.await_boot()
        current_host = self.lab.host_of(self.server)
        if current_host in self.lab.cloud.hosts:
            self.destination = next(host for host in self.lab.cloud.hosts if host != current_host)
        return recipe

    def at_step(
        self, workflow: str, step: str, strike: Callable[[str | None], object]
    ) -> StrikeOutcome:
        request = partial(RECIPES[workflow].request, self)
        return Strikes(self.lab, self.server).at_step(workflow, step, strike, request)

    # --- strikes ---
    def strike(self, cell: Cell, host: str | None) -> None:
        """Cause the cell's fault. ``host`` is the host of the step in the journal."""
        here = host or self.lab.host_of(self.server)
        if cell.fault is Fault.DELETE:
            self.lab.rest().insist("DELETE", self.path, expected=(204, 404))
        if cell.fault is Fault.RETURN:
            self.lab.strike("start", self.destination)
        if cell.fault is not Fault.KILL:
            return
        if cell.victim in (
            Victim.GUEST,
            Victim.GUEST_THERE,
            Victim.LIBVIRTD,
            Victim.LIBVIRTD_THERE,
        ):
            target = (
                self.destination
                if cell.victim in (Victim.GUEST_THERE, Victim.LIBVIRTD_THERE)
                else here
            )
            is_guest = cell.victim in (Victim.GUEST, Victim.GUEST_THERE)
            os.kill(self._find_process(target, self.server if is_guest else ""), signal.SIGKILL)
            return
        name = str(cell.victim)
        if cell.victim in (Victim.AGENT, Victim.AGENT_THERE):
            name = agent_name(self.lab, here if cell.victim is Victim.AGENT else self.destination)
        self.struck = name, find_process(self.lab.cloud, name)
        process_control.kill(self.lab.cloud, name)

    def _find_process(self, host: str, server: str) -> int:
        """Wait for the QEMU of a server on a host and return the pid. Without server: libvirtd."""
        number = self.lab.lab.number(host)
        space = identify(NAMESPACES / f"{self.lab.cloud.underlay.namespace(number)}")

        def list_pids() -> list[int]:
            return [
                int(process.name)
                for process in Path("/proc").glob("[0-9]*")
                if identify(process / "ns/net") == space
                and (server_of(process) == server if server else is_libvirtd(process))
            ]

        return int(await_true(list_pids, 30, f"no process of {host}", pause=0.005)[0])

    # --- checks ---
    def play(self, cell: Cell) -> str:
        """Run one cell with all checks, and return a line that describes the outcome."""
        self.struck = "", None
        strike = partial(self.strike, cell)
        if cell.workflow == "create":
            self.remove()
            name = f"{NAME}-{uuid.uuid4().hex[:6]}"
            server = self.request_server(name)
            self.guest = Witness(self.lab, server, name, "")
            strikes = Strikes(self.lab, server)
            ended = strikes.at_step("create", cell.step, strike, lambda: None, frozenset())
            if cell.expectation is not Expectation.GONE:
                self.use_server(server, name)
        else:
            self.ensure_guest()
            recipe = self.prepare(cell.workflow)
            ended = self.at_step(cell.workflow, cell.step, strike)
            if recipe.wipes:
                self.canary = ""
        return self.check_outcome(cell, ended)

    def check_outcome(self, cell: Cell, ended: StrikeOutcome) -> str:
        """Check all conditions of a cell, and return a line that describes the outcome."""
        if self.struck[0]:
            await_back(self.lab, *self.struck)
        self.await_hosts()
        text = f"{cell.step} was {ended.last_event}, {ended.state} after {ended.seconds:.1f} s"
        assert self.guest is not None
        if cell.expectation is Expectation.GONE or cell.workflow == "delete":
            expected_state = "superseded" if cell.expectation is Expectation.GONE else "done"
            assert ended.state == expected_state, ended
            guest, self.guest = self.guest, None
            self.await_removed(guest)
        elif ended.state == "failed" and cell.expectation is Expectation.ENDS:
            await_true(self.is_as_shown, SETTLE, self.describe)
            await_cleanups(self.lab, self.server)
            status = self.await_idle()
            self.run_workflow(cell.workflow)
            text += f" ({ended.message}); {status}, and done when requested again"
        else:
            assert ended.state == "done", ended
        if self.guest is not None:
            status = RECIPES[cell.workflow].end_status if cell.workflow in RECIPES else "ACTIVE"
            assert self.await_idle() in (status, *KEPT.get(status, ())), self.rest.server(
                self.server
            )
            self.check_runs_once()
            self.check_disk()
        self.check_doctor()
        self.delete_images()
        return text

    def await_hosts(self) -> None:
        """Wait until the libvirtd of each running host answers."""
        for host in self.lab.cloud.hosts:
            if self.lab.lab.state(host) == "up":
                await_true(
                    lambda name=host: self.lab.lab.guests(name) is not None,  # type: ignore[misc]  # bound here
                    60,
                    f"libvirtd of {host} answers",
                )

    def is_as_shown(self) -> bool:
        """Return True if the domain runs on the shown host exactly while the API shows ACTIVE.

        The API shows a dead guest as SHUTOFF after a short time.
        """
        shown = self.rest.server(self.server)
        runs = self.lab.find_domains(self.server).get(shown["OS-EXT-SRV-ATTR:host"]) == "running"
        return bool(runs == (shown["status"] == "ACTIVE"))

    def check_runs_once(self) -> None:
        """Check that an ACTIVE server runs only on the shown host, and no server on two hosts."""
        shown = self.rest.server(self.server)
        shown_host = shown["OS-EXT-SRV-ATTR:host"]
        running = [
            host for host, state in self.lab.find_domains(self.server).items() if state == "running"
        ]
        if shown["status"] == "ACTIVE":
            await_true(
                lambda: self.lab.find_domains(self.server) == {shown_host: "running"},
                SETTLE,
                lambda: (shown_host, self.lab.find_domains(self.server)),
            )
        assert len(running) <= 1, running

    def check_disk(self) -> None:
        """Check that the canary is on one of the server's disks, if the server has a disk."""
        if self.canary:
            digests = self.read_noise()
            assert self.canary in digests or not digests, f"of {self.canary} there is {digests}"

    def check_doctor(self) -> None:
        """Wait until the doctor has no new findings."""

        def findings() -> set[str]:
            result = self.lab.doctor()
            if "did not answer" in result.stderr:
                return {result.stderr}
            return {*result.stdout.splitlines()} - {"all is well"} - self.known

        await_true(lambda: not findings(), CALM, findings, pause=1)

    def recover(self) -> str:
        """Repair the lab and remove the guest after a failed cell.

        Returns:
            Failures of the repair, and findings of the doctor.
        """
        problems = []
        for repair in (self.lab.repair, self.remove):
            try:
                repair()
            # The next cell starts with a new guest in any case.
            except Exception as problem:  # noqa: BLE001
                problems.append(f"{type(problem).__name__}: {problem}"[:500])
        self.guest, self.volumes = None, []
        self.known |= {*self.lab.doctor().stdout.splitlines()} - {"all is well"}
        return "\n".join([*problems, *sorted(self.known)])

    def describe(self) -> str:
        """Describe the current guest: server, domains, last actions and findings of the doctor."""
        if self.guest is None:
            return ""
        query = "SELECT id, workflow, state, step, message FROM actions WHERE server_id = ? ORDER BY created_at"
        strikes = Strikes(self.lab, self.server)
        rows = [(*row, strikes.journal(row[0])) for row in self.lab.rows(query, self.server)[-3:]]
        shown = self.rest.server(self.server)
        facts = {key: shown.get(key) for key in ("status", "fault", "OS-EXT-SRV-ATTR:host")}
        lines = [f"{facts} {self.lab.find_domains(self.server)}", *map(str, rows)]
        return "\n".join([*lines, self.lab.doctor().stdout])


def agent_name(lab: LiveLab, host: str) -> str:
    """Return the name of a host's agent process."""
    number = lab.lab.number(host)
    return "agent" if number == 1 else f"agent-{number}"


def is_libvirtd(process: Path) -> bool:
    try:
        return (process / "comm").read_text().strip() == "libvirtd"
    except OSError:
        # The process has ended.
        return False


def digest_noise(path: str) -> str:
    """Return a digest of a disk at the position of a witness's noise. The guest may run."""
    output = subprocess.run(
        ["qemu-io", "-r", "-U", "-c", f"read -v {NOISE_AT}M {NOISE}", path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    lines = re.findall(r"^[0-9a-f]{8}:  .{47}", output, re.MULTILINE)
    assert len(lines) == NOISE // 16, output[-300:]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
