# SPDX-License-Identifier: Apache-2.0
"""``./deploy/lab`` with three hosts, failures of its hosts, and the watcher for the tests of moves.

The moves themselves are in other files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree as ET

import libvirt
import pytest

from deploy.one_machine.cloud import processes
from deploy.one_machine.cloud.cloud import Ports
from deploy.one_machine.cloud.configuration import LIVE_MIGRATION_PORT
from deploy.one_machine.cloud.process_control import find_process
from deploy.one_machine.lab_hosts import Facts, Lab
from deploy.one_machine.machine.abilities import FOR_NETWORKS
from deploy.packages import ROOT
from deploy.testing.servers import free_ports
from tests.e2e.conftest import WatchedLab, new_home
from tests.e2e.guests import witness
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.mini_guest import mini_guest
from tests.e2e.watcher import MOMENT, WAYS
from tests.services import demand
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

#: Seconds that a boot of a host may take until its agent has registered.
HELLO = 60
HOST = "lab2"


@pytest.mark.slice("default")
def test_lab_up_prints_hosts_and_commands(lab_up: WatchedLab) -> None:
    output = lab_up.result.stdout
    assert "[17/17]" in output and "3 hosts with storage of their own" in output
    for words in (
        "lab1, lab2, lab3",
        "./deploy/lab status",
        "./deploy/lab kill lab1",
        "./deploy/lab down",
    ):
        assert words in output


@pytest.mark.slice("default")
def test_lab_hosts_have_own_boot_storage_address_and_libvirtd(lab: LiveLab) -> None:
    boots = {host: lab.registration(host)[0] for host in lab.cloud.hosts}
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len({machine, *boots.values()}) == 4
    shown = {
        hypervisor.name: hypervisor
        for hypervisor in lab.seed.admin.compute.hypervisors(details=True)
    }
    assert sorted(shown) == list(lab.cloud.hosts) and {
        hypervisor.state for hypervisor in shown.values()
    } == {"up"}
    assert len({lab.facts(host)["storage"] for host in lab.cloud.hosts}) == 3
    for number, host in enumerate(lab.cloud.hosts, 1):
        address = lab.cloud.host_address(number)
        assert lab.facts(host)["transfer"].startswith(f"{address}:")
        uri = f"qemu+tls://{address}:{LIVE_MIGRATION_PORT}/system"
        assert lab.facts(host)["migration"] == {"uri": uri, "address": address}
        assert (
            Path(
                f"/proc/{find_process(lab.cloud, f'agent-{number}' if number > 1 else 'agent')}/ns/net"
            )
            .stat()
            .st_ino
            == Path(f"/run/netns/{lab.cloud.underlay.namespace(number)}").stat().st_ino
        )
        with connect_to_libvirtd(lab, host) as libvirtd:
            assert libvirtd.getHostname() == host


def test_lab_status_shows_hosts_and_guests(lab: LiveLab) -> None:
    with mini_guest(lab, "shown", host=HOST) as guest:
        output = lab.command("status").stdout
        lines = [line.split() for line in output.splitlines()[1:]]
        assert [HOST, "up", lab.cloud.host_address(2)] in lines
        below = lines[lines.index([HOST, "up", lab.cloud.host_address(2)]) + 1 :]
        assert [guest.server, "running"] in takewhile(
            lambda line: line[0] not in lab.cloud.hosts, below
        )


def test_second_lab_up_changes_nothing_and_other_host_number_is_refused(lab: LiveLab) -> None:
    before = (
        [find_process(lab.cloud, program.name) for program in processes.programs(lab.cloud)],
        [lab.registration(h) for h in lab.cloud.hosts],
    )
    result = lab.up()
    assert result.returncode == 0, result
    after = (
        [find_process(lab.cloud, program.name) for program in processes.programs(lab.cloud)],
        [lab.registration(h) for h in lab.cloud.hosts],
    )
    assert before == after
    result = lab.command("up", "2")
    assert (
        result.returncode == 1
        and "has other settings: 3 hosts" in result.stderr
        and "./deploy/lab down" in result.stderr
    )


@pytest.mark.slice("default")
@pytest.mark.parametrize("words", [("kill", "rack1"), ("cut",), ("strike", HOST)])
def test_lab_command_with_wrong_arguments_stops_no_host(
    lab: LiveLab, words: tuple[str, ...]
) -> None:
    result = lab.command(*words)
    assert result.returncode == 1 and "What to do: " in result.stderr
    assert [lab.lab.state(host) for host in lab.cloud.hosts] == ["up"] * 3


def test_lab_host_restarts_its_guests_after_power_loss(lab: LiveLab) -> None:
    with (
        mini_guest(lab, "phoenix", host=HOST) as guest,
        mini_guest(lab, "bystander", host="lab3") as other,
    ):
        before, beside = guest.read_state(), other.read_state()
        boot, session = lab.registration(HOST)
        lab.strike("kill", HOST)
        assert (lab.lab.state(HOST), lab.find_domains(guest.server)) == ("off", {})
        assert "off" in lab.command("status").stdout
        assert not (lab.cloud.libvirt_folder(2) / "run").exists(), "a host boots with an empty /run"
        # A second kill does no harm.
        lab.strike("kill", HOST)
        lab.await_host(HOST, "down", SILENCE)
        assert lab.command("cut", HOST).returncode == 1
        # By default the conductor evacuates no servers.
        assert lab.host_of(guest.server) == HOST

        lab.strike("start", HOST)
        await_true(lambda: lab.registration(HOST)[0] != boot, HELLO, lambda: lab.registration(HOST))
        assert lab.registration(HOST)[1] != session
        await_true(
            lambda: lab.find_domains(guest.server) == {HOST: "running"},
            HELLO,
            lambda: lab.find_domains(guest.server),
        )
        after = guest.read_state()
        assert after.canary == before.canary and after.run != before.run
        assert guest.rest.server(guest.server)["status"] == "ACTIVE"
        assert other.read_state().run == beside.run and other.read_state().count > beside.count


def test_stopped_guest_stays_stopped_after_power_loss_of_host(lab: LiveLab) -> None:
    with mini_guest(lab, "sleeper", host=HOST) as guest:
        guest.rest.act(guest.server, "os-stop")
        guest.rest.await_status(guest.server, "SHUTOFF")
        boot, _ = lab.registration(HOST)
        lab.strike("kill", HOST)
        lab.strike("start", HOST)
        await_true(lambda: lab.registration(HOST)[0] != boot, HELLO, lambda: lab.registration(HOST))
        lab.await_host(HOST)
        assert lab.find_domains(guest.server) == {HOST: "shutoff"}
        assert guest.rest.server(guest.server)["status"] == "SHUTOFF"


def test_lab_host_cut_off_keeps_its_guests_running(lab: LiveLab) -> None:
    with mini_guest(lab, "island", host=HOST) as guest:
        before, (boot, _) = guest.read_state(), lab.registration(HOST)
        lab.strike("cut", HOST)
        lab.strike("cut", HOST)
        assert lab.lab.state(HOST) == "cut"
        lab.await_host(HOST, "down", SILENCE)
        assert lab.find_domains(guest.server) == {HOST: "running"}
        lab.strike("heal", HOST)
        lab.await_host(HOST)
        after = guest.read_state()
        assert (after.run, after.canary) == (
            before.run,
            before.canary,
        ) and after.count > before.count
        assert (
            lab.registration(HOST)[0] == boot
            and guest.rest.server(guest.server)["status"] == "ACTIVE"
        )


def test_lab_fencing_hook_powers_off_cut_off_host(lab: LiveLab) -> None:
    with mini_guest(lab, "fenced", host=HOST) as guest:
        boot, _ = lab.registration(HOST)
        lab.strike("cut", HOST)
        hook = lab.cloud.fencing_hook
        assert f"fencing_hook = {hook}\n" in lab.cloud.config().read_text()
        for _ in range(2):
            # The hook has only the environment of the conductor.
            environment_words = [
                f"{key}={value}" for key, value in processes.make_environment(lab.cloud).items()
            ]
            result = lab.run("env", "-i", *environment_words, hook, HOST)
            assert (result.returncode, lab.lab.state(HOST), lab.find_domains(guest.server)) == (
                0,
                "off",
                {},
            ), result
        assert [
            line for line in lab.processes() if "qemu-system" in line and guest.server in line
        ] == []
        assert lab.run(hook, "rack1").returncode == 1
        lab.strike("start", HOST)
        await_true(lambda: lab.registration(HOST)[0] != boot, HELLO, lambda: lab.registration(HOST))
        guest.read_state()


def test_lab_up_restores_killed_and_cut_off_hosts(lab: LiveLab) -> None:
    lab.strike("kill", "lab1")
    lab.strike("cut", "lab3")
    assert [lab.lab.state(host) for host in lab.cloud.hosts] == ["off", "up", "cut"]
    result = lab.up()
    assert result.returncode == 0, result
    assert [lab.lab.state(host) for host in lab.cloud.hosts] == ["up"] * 3


def test_shared_lab_has_disks_of_all_hosts_in_one_folder(shared_lab: LiveLab) -> None:
    with (
        mini_guest(shared_lab, "one", host="lab1") as first,
        mini_guest(shared_lab, "two", host=HOST) as second,
    ):
        folder = shared_lab.home / "instances"
        assert len({shared_lab.facts(host)["storage"] for host in shared_lab.cloud.hosts}) == 1
        assert {first.server, second.server} <= {path.name for path in folder.iterdir()}
        for number in (1, 2, 3):
            assert (shared_lab.cloud.state_folder(number) / "instances").resolve() == folder
            assert not (shared_lab.cloud.state_folder(number) / "images").is_symlink()
        shared_lab.strike("kill", HOST)
        shared_lab.strike("start", HOST)
        before = first.read_state()
        second.read_state()
        assert first.read_state().run == before.run


@pytest.fixture
def incomplete_lab() -> Iterator[LiveLab]:
    """Yield a lab of two hosts that was not started completely. The test must remove its home."""
    demand(*FOR_NETWORKS)
    live = LiveLab(Lab.make(new_home(), Facts(2, False, free_ports(Ports.COUNT))))
    yield live
    assert (live.home.exists(), live.processes(), live.kernel_leftovers()) == (False, [], [])


def test_lab_down_before_first_up_removes_home_and_can_be_repeated(incomplete_lab: LiveLab) -> None:
    assert incomplete_lab.command("status").returncode == 1
    assert incomplete_lab.command("kill", HOST).returncode == 1
    assert incomplete_lab.down().returncode == 0
    assert incomplete_lab.down().returncode == 0


def test_lab_down_removes_lab_after_interrupted_up(incomplete_lab: LiveLab) -> None:
    # In the background of a shell SIGINT is ignored, and child processes inherit this.
    command = ["env", "--default-signal=INT", str(ROOT / "deploy/lab"), "up", "2"]
    with subprocess.Popen(
        command,
        env=incomplete_lab.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as up:
        assert up.stdout is not None
        output_lines = list(takewhile(lambda line: "[8/17]" not in line, up.stdout))
        os.killpg(up.pid, signal.SIGINT)
        up.wait(30)
    assert up.returncode != 0, output_lines
    assert incomplete_lab.processes() and incomplete_lab.kernel_leftovers(), output_lines
    assert incomplete_lab.down().returncode == 0


def test_lab_guests_cannot_reach_hosts_or_services(lab: LiveLab) -> None:
    with witness(lab, "prisoner", host=HOST) as guest:
        assert guest.reaches(str(lab.cloud.underlay.external[1]))
        for address in (
            lab.cloud.address,
            *(lab.cloud.host_address(number) for number in (1, 2, 3)),
        ):
            assert not guest.reaches(address), address


# --- the watcher ---
def make_spinning_domain(server: str, disk: Path) -> str:
    """Return the XML of a small domain that is always busy, because its boot code is a loop."""
    disk.write_bytes(b"\xeb\xfe".ljust(510, b"\0") + b"\x55\xaa")
    domain = ET.Element("domain", type="qemu")
    for name, text in (("name", f"spinning-{server}"), ("uuid", server), ("memory", "16384")):
        ET.SubElement(domain, name).text = text
    system = ET.SubElement(domain, "os")
    ET.SubElement(system, "type", arch="x86_64", machine="pc").text = "hvm"
    device = ET.SubElement(ET.SubElement(domain, "devices"), "disk", type="file", device="disk")
    ET.SubElement(device, "driver", name="qemu", type="raw")
    ET.SubElement(device, "source", file=str(disk))
    ET.SubElement(device, "target", dev="hda", bus="ide")
    return ET.tostring(domain, encoding="unicode")


@contextmanager
def connect_to_libvirtd(lab: LiveLab, host: str) -> Iterator[libvirt.virConnect]:
    """Connect to a host's libvirtd for a with block."""
    connection = libvirt.open(lab.uri(host))
    try:
        yield connection
    finally:
        connection.close()


def test_watcher_reports_two_running_domains_of_one_server(lab_up: WatchedLab) -> None:
    lab, server = lab_up.live, str(uuid.uuid4())
    # The watcher of the session must not fail for this server.
    lab_up.watcher.ignored.add(server)
    folders = [lab.cloud.state_folder(number) / f"spinning-{server}" for number in (1, 2)]
    watcher = lab.watcher().start()
    try:
        with connect_to_libvirtd(lab, "lab1") as first, connect_to_libvirtd(lab, "lab2") as second:
            first_domain = first.createXML(make_spinning_domain(server, folders[0]))
            second_domain = second.createXML(
                make_spinning_domain(server, folders[1]), libvirt.VIR_DOMAIN_START_PAUSED
            )
            # In this time the watcher would detect a violation.
            time.sleep(3 * MOMENT)
            assert watcher.violations == [], (
                "one that waits for a migration is paused, and runs nowhere else"
            )
            with pytest.raises(AssertionError, match=f"{server} ran on"), watcher.watching():
                second_domain.resume()
                await_true(
                    lambda: all(
                        any(f"by {way}" in violation for violation in watcher.violations)
                        for way in WAYS
                    ),
                    10 * MOMENT,
                    lambda: watcher.violations,
                )
            first_domain.suspend()
            # Sightings last for this time, so the earlier sighting must end first.
            time.sleep(MOMENT)
            # A domain that continues after the other stopped is no violation.
            with watcher.watching():
                # The watcher must see the domain several times.
                time.sleep(2 * MOMENT)
            first_domain.destroy()
            second_domain.destroy()
    finally:
        watcher.stop()
        for path in folders:
            path.unlink(missing_ok=True)


def test_watcher_fails_when_it_never_looked_at_hosts(lab_up: WatchedLab) -> None:
    watcher = lab_up.live.watcher()
    with pytest.raises(AssertionError, match="looked 0 times"), watcher.watching():
        # The watcher need not look during less than a second.
        time.sleep(1.1)
