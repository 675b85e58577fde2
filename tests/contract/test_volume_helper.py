# SPDX-License-Identifier: Apache-2.0
"""kilonova-volumes, with os-brick's own code behind its socket.

Programs and /sys are simulated as with open-iscsi and a kernel with iscsi_tcp, and record all
commands.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
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
from tests.log_lines import rendered_lines
from tests.services import demand

GIBIBYTE = 1 << 30
PORTAL, PASSWORD = "192.0.2.9:3260", "s3cret-of-the-volume"
WWN = "36001405abcdef"


class Machine:
    """The programs and the /sys files that os-brick uses.

    Commands that contain the word ``refuses`` fail.
    """

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
    """Yield a machine with a device that is a file with a name in /dev."""
    demand(Ability.ROOT)
    content = tmp_path / "content"
    with content.open("wb") as file:
        file.truncate(GIBIBYTE)
    device = Path("/dev", f"kn-{secrets.token_hex(4)}")
    device.symlink_to(content)
    simulated = Machine(device)
    for module in (linuxscsi, iscsi):
        monkeypatch.setattr(module.glob, "glob", simulated.glob)
    scsi = linuxscsi.LinuxSCSI
    monkeypatch.setattr(scsi, "get_sysfs_wwn", lambda *_, **__: simulated.wwn)
    monkeypatch.setattr(scsi, "get_name_from_path", lambda self, path: path)
    monkeypatch.setattr(scsi, "wait_for_volumes_removal", lambda *_, **__: None)
    # These are udev's names by path.
    paths = [str(device)]
    monkeypatch.setattr(iscsi.ISCSIConnector, "_get_device_path", lambda *_: paths)
    monkeypatch.setattr(nvmeof, "create_hostnqn", lambda *_: "nqn.2014-08.org.nvmexpress:uuid:1")
    yield simulated
    device.unlink()


@pytest.fixture
def helper(machine: Machine, tmp_path: Path) -> VolumeHelper:
    """Run the service in a thread, as systemd starts it, until the tests end."""
    path, state = tmp_path / "socket", tmp_path / "state"
    state.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    brick = Brick(tmp_path / "devices", state, machine.execute)
    threading.Thread(target=volume_helper.serve, args=(listener, brick), daemon=True).start()
    return VolumeHelper(path)


def new_volume(**changed: Any) -> AttachedVolume:
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


def create_connectors(helper: VolumeHelper, protocol: str = "iscsi") -> connectors.Connectors:
    allowed = connectors.Protocols(by_host=[protocol], helper=helper)
    return connectors.of_host(allowed, None, False, {"host": "h1", "ip": "192.0.2.1"})


def test_connect_and_disconnect_iscsi_volume_are_repeatable(
    machine: Machine, helper: VolumeHelper, tmp_path: Path
) -> None:
    host_connectors, attached = create_connectors(helper), new_volume()
    link = tmp_path / "devices" / attached.volume_id
    assert host_connectors.source(attached).path == f"/dev/kilonova/{attached.volume_id}"
    for _ in range(2):
        device = host_connectors.connect(attached)
        assert (device.size_bytes, device.serial) == (GIBIBYTE, WWN)
        assert link.resolve() == machine.device.resolve() and machine.session
    assert machine.ran("--login", PORTAL) and machine.ran("node.session.auth.password", PASSWORD)
    host_connectors.disconnect(attached)
    assert not link.is_symlink() and (machine.session, machine.unit) == ("", False)
    assert machine.ran("--logout", PORTAL) and machine.ran("--op", "delete")
    command_count = len(machine.commands)
    host_connectors.disconnect(attached)
    assert len(machine.commands) == command_count
    assert [file.name for file in (tmp_path / "state").glob("*.json")] == []


def test_disconnect_ends_iscsi_session_of_helper_killed_after_login(
    machine: Machine, helper: VolumeHelper, tmp_path: Path
) -> None:
    attached = new_volume()
    # The helper was killed after the login.
    (tmp_path / "state" / f"{attached.volume_id}.json").write_text("{}")
    machine.execute("iscsiadm", "-T", attached.connection["target_iqn"], "--login")
    machine.unit = True
    create_connectors(helper).disconnect(attached)
    assert (machine.session, machine.unit) == ("", False)


def test_disconnect_ends_iscsi_session_of_helper_killed_during_connect(
    machine: Machine, helper: VolumeHelper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper had logged in, and had not stored the result yet."""
    attached, connect = new_volume(), iscsi.ISCSIConnector.connect_volume

    def connect_and_die(*args: object) -> None:
        connect(*args)
        raise SystemExit

    fields = {"volume": attached.volume_id, "protocol": "iscsi", "data": attached.connection}
    with monkeypatch.context() as patches:
        patches.setattr(iscsi.ISCSIConnector, "connect_volume", connect_and_die)
        brick = Brick(tmp_path / "devices", tmp_path / "state", machine.execute)
        with pytest.raises(SystemExit):
            brick.answer({"verb": "connect", **fields})
    assert machine.session
    create_connectors(helper).disconnect(attached)
    assert (machine.session, machine.unit) == ("", False)


def test_connect_rescans_grown_volume(machine: Machine, helper: VolumeHelper) -> None:
    host_connectors, attached = create_connectors(helper), new_volume()
    host_connectors.connect(attached)
    larger = AttachedVolume(attached.volume_id, attached.device, 2, attached.connection)
    with pytest.raises(VerbFailed, match=f"it has {GIBIBYTE} bytes, not 2 GiB"):
        host_connectors.connect(larger)
    machine.grows_to = 2 * GIBIBYTE
    assert host_connectors.connect(larger).size_bytes == 2 * GIBIBYTE


def test_connect_ignores_wwn_assigned_by_target(machine: Machine, helper: VolumeHelper) -> None:
    machine.wwn = "33000000100000001"
    assert create_connectors(helper).connect(new_volume()).serial == ""


def _fail(message: str, *args: object) -> None:
    raise OSError(message)


def test_connect_failure_hides_password_in_details_and_log(
    machine: Machine,
    helper: VolumeHelper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine.refuses = "node.session.auth.password"
    with pytest.raises(VerbFailed, match="could not connect volume .* over iscsi") as failure:
        create_connectors(helper).connect(new_volume())
    assert PASSWORD not in failure.value.details
    message = f"iscsiadm: cannot use {PASSWORD}"
    caplog.clear()
    monkeypatch.setattr(iscsi.ISCSIConnector, "connect_volume", partial(_fail, message))
    with pytest.raises(VerbFailed) as failure:
        create_connectors(helper).connect(new_volume())
    log = "\n".join(rendered_lines(caplog))
    assert "cannot use ***" in failure.value.details and "cannot use ***" in log
    assert PASSWORD not in failure.value.details + log
    text = volume_helper.without_passwords(
        f"iscsiadm -v {PASSWORD}", {"data": {"auth_password": PASSWORD}}
    )
    assert text == "iscsiadm -v ***"


@pytest.mark.parametrize("password", ["a\\b", "a'b", 'a"b', "a'b\"c\\"])
@pytest.mark.parametrize("quote", [repr, json.dumps])
def test_password_is_hidden_in_quoted_text_of_failure(
    password: str, quote: Callable[[str], str]
) -> None:
    """The error of a failed program contains its output with escaped characters."""
    text = quote(f"cannot use {password} here")
    shown = volume_helper.without_passwords(text, {"data": {"auth_password": password}})
    assert shown[1:-1] == "cannot use *** here"


def test_host_properties_come_from_os_brick_of_helper(
    machine: Machine, helper: VolumeHelper
) -> None:
    properties = create_connectors(helper).about
    assert (properties["host"], properties["ip"], properties["os_type"]) == (
        "h1",
        "192.0.2.1",
        "linux",
    )
    assert properties["multipath"] is False and "platform" in properties
    missing = VolumeHelper(Path("/nowhere"))
    assert create_connectors(missing).about == {"host": "h1", "ip": "192.0.2.1"}
    with pytest.raises(VerbFailed, match=r"systemctl enable --now kilonova-volumes\.socket"):
        create_connectors(missing).connect(new_volume())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_iqn": "iqn.x/../../etc"}, "the value of target_iqn is not valid"),
        ({"target_portal": "--logoutall=all"}, "the value of target_portal is not valid"),
        ({"target_portals": [PORTAL, "-x:1"]}, "the value of target_portals is not valid"),
        ({"target_lun": "1 -"}, "the value of target_lun is not valid"),
        ({"auth_username": "-n"}, "the value of auth_username is not valid"),
        ({"auth_password": "-n"}, "the value of auth_password is not valid"),
        ({"auth_method": "None"}, "the value of auth_method is not valid"),
    ],
)
def test_connect_with_invalid_connection_data_runs_no_program(
    machine: Machine, helper: VolumeHelper, changed: dict[str, Any], message: str
) -> None:
    host_connectors = create_connectors(helper)
    machine.commands.clear()
    with pytest.raises(VerbFailed) as failure:
        host_connectors.connect(new_volume(**changed))
    assert message in failure.value.details and machine.commands == []


@pytest.mark.parametrize(
    "request_body",
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
def test_volume_helper_refuses_invalid_requests_before_any_action(
    machine: Machine, helper: VolumeHelper, tmp_path: Path, request_body: dict[str, Any]
) -> None:
    """The helper runs no program and writes no file for them."""
    with pytest.raises(
        NotDone, match="no verb|not a UUID|does not connect volumes by|contains no data"
    ):
        helper.ask(request_body)
    assert machine.commands == [] and list((tmp_path / "state").iterdir()) == []
