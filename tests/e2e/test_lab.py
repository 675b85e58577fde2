# SPDX-License-Identifier: Apache-2.0
"""``./deploy/lab``: three real hosts, struck one by one; and the watcher of all tests of moves,
which must see what it is for. Moves themselves are in other files.
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
from tests.e2e.conftest import MadeLab, new_home
from tests.e2e.guests import listener, witness
from tests.e2e.lab import SILENCE, LiveLab
from tests.e2e.watcher import MOMENT, WAYS
from tests.services import demand
from tests.waiting import await_true

pytestmark = pytest.mark.slice("moves")

#: Seconds that a boot of a host may take until its agent has registered.
HELLO = 60
HOST = "lab2"


@pytest.mark.slice("default")
def test_up_says_what_it_made_and_how_to_strike_it(lab_up: MadeLab) -> None:
    said = lab_up.said.stdout
    assert "[17/17]" in said and "3 hosts with storage of their own" in said
    for words in (
        "lab1, lab2, lab3",
        "./deploy/lab status",
        "./deploy/lab kill lab1",
        "./deploy/lab down",
    ):
        assert words in said


@pytest.mark.slice("default")
def test_each_host_has_what_is_its_own(lab: LiveLab) -> None:
    boots = {host: lab.registration(host)[0] for host in lab.cloud.hosts}
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len({machine, *boots.values()}) == 4
    shown = {one.name: one for one in lab.seed.admin.compute.hypervisors(details=True)}
    assert sorted(shown) == list(lab.cloud.hosts) and {one.state for one in shown.values()} == {
        "up"
    }
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
        with asked(lab, host) as libvirtd:
            assert libvirtd.getHostname() == host


def test_status_shows_hosts_and_guests(lab: LiveLab) -> None:
    with witness(lab, "shown", host=HOST) as guest:
        said = lab.command("status").stdout
        lines = [line.split() for line in said.splitlines()[1:]]
        assert [HOST, "up", lab.cloud.host_address(2)] in lines
        below = lines[lines.index([HOST, "up", lab.cloud.host_address(2)]) + 1 :]
        assert [guest.server, "running"] in takewhile(
            lambda line: line[0] not in lab.cloud.hosts, below
        )


def test_second_up_is_harmless_and_another_lab_is_refused(lab: LiveLab) -> None:
    before = (
        [find_process(lab.cloud, program.name) for program in processes.programs(lab.cloud)],
        [lab.registration(h) for h in lab.cloud.hosts],
    )
    done = lab.up()
    assert done.returncode == 0, done
    after = (
        [find_process(lab.cloud, program.name) for program in processes.programs(lab.cloud)],
        [lab.registration(h) for h in lab.cloud.hosts],
    )
    assert before == after
    done = lab.command("up", "2")
    assert (
        done.returncode == 1
        and "is another one: 3 hosts" in done.stderr
        and "./deploy/lab down" in done.stderr
    )


@pytest.mark.slice("default")
@pytest.mark.parametrize("words", [("kill", "rack1"), ("cut",), ("strike", HOST)])
def test_mistake_strikes_nothing(lab: LiveLab, words: tuple[str, ...]) -> None:
    done = lab.command(*words)
    assert done.returncode == 1 and "What to do: " in done.stderr
    assert [lab.lab.state(host) for host in lab.cloud.hosts] == ["up"] * 3


def test_host_that_lost_its_power_brings_its_guests_back(lab: LiveLab) -> None:
    with (
        witness(lab, "phoenix", host=HOST) as guest,
        witness(lab, "bystander", host="lab3") as other,
    ):
        before, beside = guest.account(), other.account()
        boot, session = lab.registration(HOST)
        lab.strike("kill", HOST)
        assert (lab.lab.state(HOST), lab.where(guest.server)) == ("off", {})
        assert "off" in lab.command("status").stdout
        assert not (lab.cloud.libvirt_folder(2) / "run").exists(), "a host boots with an empty /run"
        lab.strike("kill", HOST)  # again, without harm
        lab.await_host(HOST, "down", SILENCE)
        assert lab.command("cut", HOST).returncode == 1
        assert lab.place(guest.server) == HOST  # nobody moves it by itself

        lab.strike("start", HOST)
        await_true(lambda: lab.registration(HOST)[0] != boot, HELLO, lambda: lab.registration(HOST))
        assert lab.registration(HOST)[1] != session
        await_true(
            lambda: lab.where(guest.server) == {HOST: "running"},
            HELLO,
            lambda: lab.where(guest.server),
        )
        guest.await_ssh()
        after = guest.account()
        assert after.canary == before.canary and after.run != before.run
        assert guest.rest.server(guest.server)["status"] == "ACTIVE"
        assert other.account().run == beside.run and other.account().count > beside.count


def test_guest_that_was_stopped_stays_stopped_after_a_power_cut(lab: LiveLab) -> None:
    with witness(lab, "sleeper", host=HOST) as guest:
        guest.rest.act(guest.server, "os-stop")
        guest.rest.await_status(guest.server, "SHUTOFF")
        boot, _ = lab.registration(HOST)
        lab.strike("kill", HOST)
        lab.strike("start", HOST)
        await_true(lambda: lab.registration(HOST)[0] != boot, HELLO, lambda: lab.registration(HOST))
        lab.await_host(HOST)
        assert lab.where(guest.server) == {HOST: "shutoff"}
        assert guest.rest.server(guest.server)["status"] == "SHUTOFF"


def test_host_that_is_cut_off_keeps_its_guests(lab: LiveLab) -> None:
    with witness(lab, "island", host=HOST) as guest:
        before, (boot, _) = guest.account(), lab.registration(HOST)
        with listener(guest) as heard:
            lab.strike("cut", HOST)
            lab.strike("cut", HOST)
            assert lab.lab.state(HOST) == "cut"
            lab.await_host(HOST, "down", SILENCE)
            assert lab.where(guest.server) == {HOST: "running"}
            lab.strike("heal", HOST)
            lab.await_host(HOST)
            guest.await_ssh()
        assert heard.longest > 5
        after = guest.account()
        assert (after.run, after.canary) == (
            before.run,
            before.canary,
        ) and after.count > before.count
        assert (
            lab.registration(HOST)[0] == boot
            and guest.rest.server(guest.server)["status"] == "ACTIVE"
        )


def test_fencing_hook_kills_what_is_cut_off_and_says_so(lab: LiveLab) -> None:
    with witness(lab, "fenced", host=HOST) as guest:
        boot, _ = lab.registration(HOST)
        lab.strike("cut", HOST)
        hook = lab.cloud.fencing_hook
        assert f"fencing_hook = {hook}\n" in lab.cloud.config().read_text()
        for _ in range(2):
            # With nothing but what the conductor has in its environment.
            given = [
                f"{key}={value}" for key, value in processes.make_environment(lab.cloud).items()
            ]
            done = lab.run("env", "-i", *given, hook, HOST)
            assert (done.returncode, lab.lab.state(HOST), lab.where(guest.server)) == (
                0,
                "off",
                {},
            ), done
        assert [
            line for line in lab.processes() if "qemu-system" in line and guest.server in line
        ] == []
        assert lab.run(hook, "rack1").returncode == 1
        lab.strike("start", HOST)
        await_true(lambda: lab.registration(HOST)[0] != boot, HELLO, lambda: lab.registration(HOST))
        guest.await_ssh()


def test_up_brings_struck_hosts_back(lab: LiveLab) -> None:
    lab.strike("kill", "lab1")
    lab.strike("cut", "lab3")
    assert [lab.lab.state(host) for host in lab.cloud.hosts] == ["off", "up", "cut"]
    done = lab.up()
    assert done.returncode == 0, done
    assert [lab.lab.state(host) for host in lab.cloud.hosts] == ["up"] * 3


def test_disks_of_a_shared_lab_are_in_one_folder(shared_lab: LiveLab) -> None:
    with (
        witness(shared_lab, "one", host="lab1") as one,
        witness(shared_lab, "two", host=HOST) as two,
    ):
        folder = shared_lab.home / "instances"
        assert len({shared_lab.facts(host)["storage"] for host in shared_lab.cloud.hosts}) == 1
        assert {one.server, two.server} <= {path.name for path in folder.iterdir()}
        for number in (1, 2, 3):
            assert (shared_lab.cloud.state_folder(number) / "instances").resolve() == folder
            assert not (shared_lab.cloud.state_folder(number) / "images").is_symlink()
        shared_lab.strike("kill", HOST)
        shared_lab.strike("start", HOST)
        before = one.account()
        two.await_ssh()
        assert one.account().run == before.run


@pytest.fixture
def half() -> Iterator[LiveLab]:
    """A lab of two hosts that was never finished; its home is made and must not stay."""
    demand(*FOR_NETWORKS)
    live = LiveLab(Lab.make(new_home(), Facts(2, False, free_ports(Ports.COUNT))))
    yield live
    assert (live.home.exists(), live.processes(), live.in_kernel()) == (False, [], [])


def test_lab_that_never_began_is_taken_down(half: LiveLab) -> None:
    assert half.command("status").returncode == 1
    assert half.command("kill", HOST).returncode == 1
    assert half.down().returncode == 0
    assert half.down().returncode == 0


def test_interrupted_up_is_taken_down(half: LiveLab) -> None:
    # Whoever runs the tests behind a shell has Ctrl-C ignored, and so would have what they start.
    command = ["env", "--default-signal=INT", str(ROOT / "deploy/lab"), "up", "2"]
    with subprocess.Popen(
        command,
        env=half.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as up:
        assert up.stdout is not None
        said = list(takewhile(lambda line: "[8/17]" not in line, up.stdout))
        os.killpg(up.pid, signal.SIGINT)
        up.wait(30)
    assert up.returncode != 0, said
    assert half.processes() and half.in_kernel(), said
    assert half.down().returncode == 0


def test_guests_reach_neither_hosts_nor_services(lab: LiveLab) -> None:
    with witness(lab, "prisoner", host=HOST) as guest:
        assert guest.reaches(str(lab.cloud.underlay.external[1]))
        for address in (
            lab.cloud.address,
            *(lab.cloud.host_address(number) for number in (1, 2, 3)),
        ):
            assert not guest.reaches(address), address


# --- the watcher ---
def spinning(server: str, disk: Path) -> str:
    """A domain that needs nothing and works all the time: its disk's first sector jumps to
    itself."""
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
def asked(lab: LiveLab, host: str) -> Iterator[libvirt.virConnect]:
    """A connection to a host's libvirtd."""
    connection = libvirt.open(lab.uri(host))
    try:
        yield connection
    finally:
        connection.close()


def test_watcher_sees_two_running_domains_of_one_server(lab_up: MadeLab) -> None:
    lab, server = lab_up.live, str(uuid.uuid4())
    lab_up.watcher.ignored.add(server)  # it may see this, and must not fail for it
    folders = [lab.cloud.state_folder(number) / f"spinning-{server}" for number in (1, 2)]
    watcher = lab.watcher().start()
    try:
        with asked(lab, "lab1") as first, asked(lab, "lab2") as second:
            here = first.createXML(spinning(server, folders[0]))
            there = second.createXML(spinning(server, folders[1]), libvirt.VIR_DOMAIN_START_PAUSED)
            time.sleep(3 * MOMENT)  # time enough to see what must not be seen
            assert watcher.violations == [], (
                "one that waits for a migration is paused, and runs nowhere else"
            )
            with pytest.raises(AssertionError, match=f"{server} ran on"), watcher.watching():
                there.resume()
                await_true(
                    lambda: all(
                        any(f"by {way}" in one for one in watcher.violations) for way in WAYS
                    ),
                    10 * MOMENT,
                    lambda: watcher.violations,
                )
            here.suspend()
            time.sleep(MOMENT)  # a sighting is of a moment, and this one must be over
            with watcher.watching():  # one goes on where the other stopped
                time.sleep(2 * MOMENT)  # time enough to see what must not be seen
            here.destroy()
            there.destroy()
    finally:
        watcher.stop()
        for path in folders:
            path.unlink(missing_ok=True)


def test_watcher_that_does_not_look_fails(lab_up: MadeLab) -> None:
    watcher = lab_up.live.watcher()
    with pytest.raises(AssertionError, match="looked 0 times"), watcher.watching():
        time.sleep(1.1)  # a watch of less than a second need not have looked
