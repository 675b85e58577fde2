# SPDX-License-Identifier: Apache-2.0
"""kilonova-volumes: os-brick's own code behind its socket, on a machine whose programs and /sys
answer as open-iscsi and a kernel with iscsi_tcp do; here they are noted."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from os_brick.initiator import linuxscsi
from os_brick.initiator.connectors import iscsi
from os_brick.privileged import nvmeof
from oslo_concurrency import processutils

from common.domain import ids
from common.domain.models import AttachedVolume
from compute_agent.privileged import volume_helper
from compute_agent.privileged.volume_helper import Brick, NotDone, VolumeHelper
from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.volumes import connectors
from deploy.one_machine.machine.abilities import Ability
from tests.services import demand

GIBIBYTE = 1 << 30
PORTAL, PASSWORD = "192.0.2.9:3260", "s3cret-of-the-volume"
WWN = "36001405abcdef"


class Machine:
    """What os-brick would run, and see in /sys. ``refuses``: a word of commands that fail."""

    def __init__(self, device: Path) -> None:
        self.device, self.commands = device, []  # type: Path, list[list[str]]
        self.session, self.unit, self.refuses, self.wwn = "", False, "", WWN
        self.grows_to = 0

    def execute(self, *command: str, **options: Any) -> tuple[str, str]:
        words = [str(word) for word in command]
        self.commands.append(words)
        if self.refuses and self.refuses in words:
            raise processutils.ProcessExecutionError(exit_code=8, cmd=" ".join(words))
        if words[:3] == ["iscsiadm", "-m", "session"]:
            return (self.session, "")
        if "--login" in words:
            name = words[words.index("-T") + 1]
            self.session = f"tcp: [1] {PORTAL},1 {name} (non-flash)\n"
        if "--logout" in words:
            self.session, self.unit = "", False
        if words[0] == "tee" and words[-1].endswith("/scan"):
            self.unit = True
        if words[0] == "tee" and words[-1].endswith("/rescan") and self.grows_to:
            os.truncate(self.device, self.grows_to)
        answers = {
            "sg_scan": f"{self.device}: scsi7 channel=0 id=0 lun=1 [em]\n",
            "blockdev": str(self.device.stat().st_size),
            "/lib/udev/scsi_id": self.wwn,
        }
        return (answers.get(words[0], ""), "")

    def glob(self, pattern: str) -> list[str]:
        if not self.session:
            return []
        if pattern.endswith("/target*"):
            return ["/sys/class/iscsi_host/host7/device/session1/target7:0:0"]
        if pattern.startswith("/sys/class/iscsi_host/"):
            return ["/sys/class/iscsi_host/host7/device/session1"]
        if "/block/" in pattern or pattern.startswith("/sys/class/scsi_host/"):
            folder = "/sys/class/scsi_host/host7/device/session1/target7:0:0/7:0:0:1/block"
            return [f"{folder}/{self.device.name}"] if self.unit else []
        return []

    def ran(self, *words: str) -> bool:
        return any(set(words) <= set(command) for command in self.commands)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Its device is a file that has a name in /dev."""
    demand(Ability.ROOT)
    content = tmp_path / "content"
    with content.open("wb") as file:
        file.truncate(GIBIBYTE)
    device = Path("/dev", f"kn-{secrets.token_hex(4)}")
    device.symlink_to(content)
    made = Machine(device)
    for module in (linuxscsi, iscsi):
        monkeypatch.setattr(module.glob, "glob", made.glob)
    scsi = linuxscsi.LinuxSCSI
    monkeypatch.setattr(scsi, "get_sysfs_wwn", lambda *_, **__: made.wwn)
    monkeypatch.setattr(scsi, "get_name_from_path", lambda self, path: path)
    monkeypatch.setattr(scsi, "wait_for_volumes_removal", lambda *_, **__: None)
    paths = [str(device)]  # udev's names by path
    monkeypatch.setattr(iscsi.ISCSIConnector, "_get_device_path", lambda *_: paths)
    monkeypatch.setattr(nvmeof, "create_hostnqn", lambda *_: "nqn.2014-08.org.nvmexpress:uuid:1")
    yield made
    device.unlink()


@pytest.fixture
def helper(machine: Machine, tmp_path: Path) -> VolumeHelper:
    """Serves as systemd would start it, in a thread, until the tests end."""
    path, state = tmp_path / "socket", tmp_path / "state"
    state.mkdir()
    where = socket.socket(socket.AF_UNIX)
    where.bind(str(path))
    where.listen()
    brick = Brick(tmp_path / "devices", state, machine.execute)
    threading.Thread(target=volume_helper.serve, args=(where, brick), daemon=True).start()
    return VolumeHelper(path)


def volume(**changed: Any) -> AttachedVolume:
    key = ids.new()
    data = {
        "target_discovered": False,
        "target_portal": PORTAL,
        "target_iqn": f"iqn.2010-10.org.openstack:volume-{key}",
        "target_lun": 1,
        "auth_method": "CHAP",
        "auth_username": "someone",
        "auth_password": PASSWORD,
        "volume_id": key,
        "qos_specs": None,
        "access_mode": "rw",
        "encrypted": False,
        **changed,
    }
    return AttachedVolume(key, "/dev/vdb", 1, {"driver_volume_type": "iscsi", **data})


def host(helper: VolumeHelper, protocol: str = "iscsi") -> connectors.Connectors:
    allowed = connectors.Protocols(by_host=[protocol], helper=helper)
    return connectors.of_host(allowed, None, False, {"host": "h1", "ip": "192.0.2.1"})


def test_a_unit_comes_and_goes(machine: Machine, helper: VolumeHelper, tmp_path: Path) -> None:
    there, given = host(helper), volume()
    link = tmp_path / "devices" / given.volume_id
    assert there.source(given).path == f"/dev/kilonova/{given.volume_id}"
    for _ in range(2):
        found = there.connect(given)
        assert (found.size_bytes, found.serial) == (GIBIBYTE, WWN)
        assert link.resolve() == machine.device.resolve() and machine.session
    assert machine.ran("--login", PORTAL) and machine.ran("node.session.auth.password", PASSWORD)
    there.disconnect(given)
    assert not link.is_symlink() and (machine.session, machine.unit) == ("", False)
    assert machine.ran("--logout", PORTAL) and machine.ran("--op", "delete")
    known = len(machine.commands)
    there.disconnect(given)
    assert len(machine.commands) == known
    assert [one.name for one in (tmp_path / "state").glob("*.json")] == []


def test_what_was_half_connected_is_let_go(
    machine: Machine, helper: VolumeHelper, tmp_path: Path
) -> None:
    given = volume()
    # A helper that was killed after its login.
    (tmp_path / "state" / f"{given.volume_id}.json").write_text("{}")
    machine.execute("iscsiadm", "-T", given.connection["target_iqn"], "--login")
    machine.unit = True
    host(helper).disconnect(given)
    assert (machine.session, machine.unit) == ("", False)


def test_a_helper_that_is_killed_lets_go_later(
    machine: Machine, helper: VolumeHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had logged in, and nothing of that was written yet."""
    given, connect = volume(), iscsi.ISCSIConnector.connect_volume

    def killed(*what: object) -> None:
        connect(*what)
        raise SystemExit

    question = {"volume": given.volume_id, "protocol": "iscsi", "data": given.connection}
    with monkeypatch.context() as dies:
        dies.setattr(iscsi.ISCSIConnector, "connect_volume", killed)
        brick = Brick(tmp_path / "devices", tmp_path / "state", machine.execute)
        with pytest.raises(SystemExit):
            brick.answer({"verb": "connect", **question})
    assert machine.session
    host(helper).disconnect(given)
    assert (machine.session, machine.unit) == ("", False)


def test_a_volume_that_has_grown_is_scanned(machine: Machine, helper: VolumeHelper) -> None:
    there, given = host(helper), volume()
    there.connect(given)
    larger = AttachedVolume(given.volume_id, given.device, 2, given.connection)
    with pytest.raises(VerbFailed, match=f"it has {GIBIBYTE} bytes, not 2 GiB"):
        there.connect(larger)
    machine.grows_to = 2 * GIBIBYTE
    assert there.connect(larger).size_bytes == 2 * GIBIBYTE


def test_a_name_that_the_target_assigns_is_no_serial(
    machine: Machine, helper: VolumeHelper
) -> None:
    machine.wwn = "33000000100000001"
    assert host(helper).connect(volume()).serial == ""


def _fails(said: str, *what: object) -> None:
    raise OSError(said)


def test_a_failure_is_said_without_the_password(
    machine: Machine,
    helper: VolumeHelper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine.refuses = "node.session.auth.password"
    with pytest.raises(VerbFailed, match="could not connect volume .* over iscsi") as refused:
        host(helper).connect(volume())
    assert PASSWORD not in refused.value.details
    said = f"iscsiadm: cannot use {PASSWORD}"
    caplog.clear()
    monkeypatch.setattr(iscsi.ISCSIConnector, "connect_volume", partial(_fails, said))
    with pytest.raises(VerbFailed) as refused:
        host(helper).connect(volume())
    assert "cannot use ***" in refused.value.details and "cannot use ***" in caplog.text
    assert PASSWORD not in refused.value.details + caplog.text
    text = volume_helper.without_passwords(
        f"iscsiadm -v {PASSWORD}", {"data": {"auth_password": PASSWORD}}
    )
    assert text == "iscsiadm -v ***"


def test_the_host_is_described_as_os_brick_sees_it(machine: Machine, helper: VolumeHelper) -> None:
    about = host(helper).about
    assert (about["host"], about["ip"], about["os_type"]) == ("h1", "192.0.2.1", "linux")
    assert about["multipath"] is False and "platform" in about
    missing = VolumeHelper(Path("/nowhere"))
    assert host(missing).about == {"host": "h1", "ip": "192.0.2.1"}
    with pytest.raises(VerbFailed, match=r"systemctl enable --now kilonova-volumes\.socket"):
        host(missing).connect(volume())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"target_iqn": "iqn.x/../../etc"}, "target_iqn is not what it is"),
        ({"target_portal": "--logoutall=all"}, "target_portal is not what it is"),
        ({"target_portals": [PORTAL, "-x:1"]}, "target_portals is not what it is"),
        ({"target_lun": "1 -"}, "target_lun is not what it is"),
        ({"auth_username": "-n"}, "auth_username is not what it is"),
        ({"auth_password": "-n"}, "auth_password is not what it is"),
        ({"auth_method": "None"}, "auth_method is not what it is"),
    ],
)
def test_what_is_no_name_reaches_no_program(
    machine: Machine, helper: VolumeHelper, changed: dict[str, Any], said: str
) -> None:
    there = host(helper)
    machine.commands.clear()
    with pytest.raises(VerbFailed) as refused:
        there.connect(volume(**changed))
    assert said in refused.value.details and machine.commands == []


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"verb": "run", "volume": ids.new()},
        {"verb": "connect", "volume": "../x", "protocol": "iscsi", "data": {"target_lun": 1}},
        {
            "verb": "connect",
            "volume": ids.new() + "\n",
            "protocol": "iscsi",
            "data": {"target_lun": 1},
        },
        {"verb": "connect", "volume": ids.new(), "protocol": "local", "data": {"x": 1}},
        {"verb": "connect", "volume": ids.new(), "protocol": "iscsi", "data": {"x": 1}},
        {"verb": "disconnect", "volume": ids.new(), "protocol": "iscsi", "data": 7},
    ],
)
def test_a_question_of_another_kind_is_refused(
    machine: Machine, helper: VolumeHelper, tmp_path: Path, question: dict[str, Any]
) -> None:
    """Before anything is looked at."""
    with pytest.raises(NotDone, match="no verb|not a UUID|not reached by|names nothing"):
        helper.ask(question)
    assert machine.commands == [] and list((tmp_path / "state").iterdir()) == []
