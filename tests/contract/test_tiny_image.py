# SPDX-License-Identifier: Apache-2.0
"""The tiny image on a plain QEMU, without an agent.

The tests cover networks, metadata, SSH, and a prompt on the screen. Other tests rely on these
properties through hosts and clouds.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.domain.models import Flavor, GuestSpec
from compute_agent.virt.libvirt.guests.config_drive import ISO9660, VFAT, ConfigDrives
from deploy.testing.servers import free_ports
from tests.contract.virt_rigs import BOOT_SECONDS
from tests.services import demand
from tests.waiting import await_true

pytestmark = pytest.mark.kvm_or_tcg
TOOLS = ("qemu-system-x86_64", "ssh", "ssh-keygen", "mkfs.vfat", "mcopy")
LOG_PREFIX = "kilonova tiny guest: "
#: User data of the guest that acts as the network's host. The guest runs DHCP with a static
#: route, and a metadata service.
HOST = """#!/bin/sh
ip addr add 192.168.77.1/24 dev eth0
ip addr add 169.254.169.254/32 dev lo
cat > /tmp/udhcpd.conf <<END
start 192.168.77.10
end 192.168.77.10
interface eth0
opt subnet 255.255.255.0
opt router 192.168.77.99
opt staticroutes 10.9.0.0/16 192.168.77.1, 169.254.169.254/32 192.168.77.1
opt mtu 1400
opt dns 192.168.77.1
END
touch /tmp/leases
udhcpd -S /tmp/udhcpd.conf
mkdir -p /tmp/www/openstack/latest
cp /mnt/config/openstack/latest/meta_data.json /tmp/www/openstack/latest/
cat > /tmp/www/openstack/latest/user_data <<END
#!/bin/sh
echo "route \\$(ip route show 10.9.0.0/16)"
echo "default [\\$(ip route | grep ^default)]"
echo "mtu \\$(cat /sys/class/net/eth0/mtu)"
echo "resolver \\$(cat /etc/resolv.conf)"
END
httpd -p 169.254.169.254:80 -h /tmp/www
"""


class PlainGuest:
    """An emulated guest. ``arguments`` follow QEMU's arguments for a disk and a serial console."""

    def __init__(self, folder: Path, image: Path, *arguments: str) -> None:
        folder.mkdir()
        self._console, self._monitor = folder / "console", folder / "monitor"
        self._process = subprocess.Popen(
            [
                "qemu-system-x86_64",
                "-machine",
                "pc",
                "-accel",
                "tcg",
                "-m",
                "128",
                "-snapshot",
                "-display",
                "none",
                "-drive",
                f"file={image},if=virtio,format=qcow2",
                "-nodefaults",
                "-vga",
                "std",
                "-serial",
                f"file:{self._console}",
                "-qmp",
                f"unix:{self._monitor},server=on,wait=off",
                *arguments,
            ]
        )

    def console(self) -> str:
        return self._console.read_text(errors="replace") if self._console.exists() else ""

    def await_word(self, *words: str) -> None:
        """Wait until the console has shown all of these words."""
        await_true(
            lambda: all(word in self.console() for word in words),
            BOOT_SECONDS,
            lambda: f"not all of {words} in: {self.console()[-2000:]}",
        )

    def monitor(self, *commands: dict[str, object]) -> list[object]:
        """Send these commands to QEMU's monitor and return the answers."""
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
            connection.connect(str(self._monitor))
            stream.readline()
            answers = []
            for command in ({"execute": "qmp_capabilities"}, *commands):
                stream.write(json.dumps(command) + "\n")
                stream.flush()
                answers.append(
                    next(answer for answer in map(json.loads, stream) if "event" not in answer)
                )
        return [answer["return"] for answer in answers[1:]]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def start(tmp_path: Path, bootable: Path) -> Iterator[Callable[..., PlainGuest]]:
    demand(programs=TOOLS)
    guests: list[PlainGuest] = []

    def start_guest(*arguments: str) -> PlainGuest:
        guests.append(PlainGuest(tmp_path / f"guest-{len(guests)}", bootable, *arguments))
        return guests[-1]

    yield start_guest
    for guest in guests:
        guest.stop()


def build_drive(
    folder: Path, name: str, key: str, user_data: str = "", *, disk: bool = False
) -> tuple[str, ...]:
    """Build a config drive and return QEMU's arguments for this CD-ROM, or for a ``disk``."""
    spec = GuestSpec(
        server=str(uuid.uuid4()),
        fence=1,
        name=name,
        flavor=Flavor("1", "m1.nano", 1, 128, 1),
        image=None,
        config_drive=True,
        user_data=base64.b64encode(user_data.encode()).decode() or None,
        instance={
            "hostname": name,
            "keys": [{"name": 'a " key', "type": "ssh", "data": f"{key}\n"}],
        },
    )
    ConfigDrives(VFAT if disk else ISO9660).build(spec, folder / name)
    return (
        "-drive",
        f"file={folder / name},format=raw,{'if=virtio' if disk else 'if=ide,media=cdrom'}",
    )


def new_key(folder: Path) -> tuple[Path, str]:
    """Create an SSH key, and return the private key's path and the public key's text."""
    private = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", private], check=True)
    return private, private.with_suffix(".pub").read_text().strip()


def ssh(port: int, *words: str) -> subprocess.CompletedProcess[str]:
    options = [
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "LogLevel=ERROR",
        "ConnectTimeout=30",
    ]
    return subprocess.run(
        ["ssh", "-F", "none", *(f"-o{option}" for option in options), "-p", str(port), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=BOOT_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def test_tiny_guest_accepts_ssh_key_and_hotplugged_nic(
    start: Callable[..., PlainGuest], tmp_path: Path
) -> None:
    private, public = new_key(tmp_path)
    port = free_ports(1)
    guest = start(
        "-netdev",
        f"user,id=first,hostfwd=tcp:127.0.0.1:{port}-:22",
        "-device",
        "virtio-net,netdev=first",
        *build_drive(tmp_path, "web-1", public),
    )
    guest.await_word(
        f"{LOG_PREFIX}eth0 10.0.2.15/24",
        f"{LOG_PREFIX}eth0 fec0:",
        f"{LOG_PREFIX}metadata from config drive",
        f"{LOG_PREFIX}name web-1",
        f"{LOG_PREFIX}ssh ready",
        f"{LOG_PREFIX}ready",
    )
    with_key = ("-i", str(private), "-oIdentitiesOnly=yes", "root@127.0.0.1")
    logged_in = ssh(
        port,
        *with_key,
        "hostname; cat /etc/resolv.conf; ip neigh; which arping nc udhcpd httpd ping",
    )
    assert logged_in.returncode == 0, logged_in.stderr
    assert logged_in.stdout.splitlines()[:2] == ["web-1", "nameserver 10.0.2.3"]
    assert "10.0.2.2 dev eth0" in logged_in.stdout and "/bin/httpd" in logged_in.stdout
    denied = ssh(
        port,
        "-oPreferredAuthentications=none,password",
        "-oNumberOfPasswordPrompts=0",
        "root@127.0.0.1",
    )
    assert "Permission denied (publickey)" in denied.stderr

    guest.monitor(
        {
            "execute": "netdev_add",
            "arguments": {"type": "user", "id": "second", "net": "10.7.0.0/24"},
        },
        {
            "execute": "device_add",
            "arguments": {"driver": "virtio-net", "netdev": "second", "id": "nic"},
        },
    )
    guest.await_word(f"{LOG_PREFIX}eth1 10.7.0.15/24")
    default_routes = ssh(port, *with_key, "ip route | grep ^default")
    assert [line.split()[4] for line in default_routes.stdout.splitlines()] == ["eth0", "eth1"]
    guest.monitor({"execute": "device_del", "arguments": {"id": "nic"}})
    guest.await_word(f"{LOG_PREFIX}eth1 is gone")
    address = ssh(
        port, *with_key, "ip link set eth0 address 02:00:00:00:00:07 && ip link show eth0"
    )
    assert "02:00:00:00:00:07" in address.stdout


@pytest.mark.slice("guests")
def test_tiny_guest_uses_dhcp_routes_mtu_dns_and_metadata_service(
    start: Callable[..., PlainGuest], tmp_path: Path
) -> None:
    """Two guests are on one link. The first one acts as the network's host."""
    wire = f"addr.type=unix,addr.path={tmp_path}/wire"
    start(
        "-netdev",
        f"stream,id=wire,server=on,{wire}",
        "-device",
        "virtio-net,netdev=wire,mac=02:00:00:00:00:01",
        *build_drive(tmp_path, "host", "ssh-ed25519 AAAA", HOST, disk=True),
    )
    await_true((tmp_path / "wire").exists, 10, lambda: "QEMU made no socket")
    guest = start(
        "-netdev",
        f"stream,id=wire,server=off,{wire}",
        "-device",
        "virtio-net,netdev=wire,mac=02:00:00:00:00:02",
    )
    guest.await_word(
        f"{LOG_PREFIX}eth0 192.168.77.10/24",
        f"{LOG_PREFIX}metadata from 169.254.169.254",
        f"{LOG_PREFIX}name host",
        f"{LOG_PREFIX}public keys 1",
        f"{LOG_PREFIX}ssh ready",
        f"{LOG_PREFIX}user data ended with 0",
    )
    console_text = guest.console()
    assert "route 10.9.0.0/16 via 192.168.77.1 dev eth0" in console_text
    assert "default []" in console_text, (
        "a gateway counts for nothing beside classless routes (RFC 3442)"
    )
    assert "mtu 1400" in console_text and "resolver nameserver 192.168.77.1" in console_text


@pytest.mark.slice("guests")
def test_tiny_guest_keeps_files_in_tmp_after_reset(
    start: Callable[..., PlainGuest], tmp_path: Path
) -> None:
    user_data = '#!/bin/sh\necho "tmp has [$(cat /tmp/mark)]"\necho left > /tmp/mark\nsync\n'
    guest = start(*build_drive(tmp_path, "web-1", "ssh-ed25519 AAAA", user_data))
    guest.await_word("tmp has []", f"{LOG_PREFIX}user data ended with 0", f"{LOG_PREFIX}ready")
    guest.monitor({"execute": "system_reset"})
    guest.await_word("tmp has [left]")


def test_tiny_guest_without_nic_is_ready_and_shows_prompt_on_screen(
    start: Callable[..., PlainGuest], tmp_path: Path
) -> None:
    guest = start()
    guest.await_word(f"{LOG_PREFIX}metadata from nowhere", f"{LOG_PREFIX}ready")
    assert "ssh ready" not in guest.console() and "eth0" not in guest.console()
    screen = tmp_path / "screen"
    dump_screen: dict[str, object] = {
        "execute": "pmemsave",
        "arguments": {"val": 0xB8000, "size": 80 * 25 * 2, "filename": str(screen)},
    }

    def read_screen() -> str:
        guest.monitor(dump_screen)
        return screen.read_bytes()[::2].decode("cp437")

    await_true(
        lambda: f"{LOG_PREFIX}ready" in read_screen() and "/ #" in read_screen(), 10, read_screen
    )
    for key in (
        "e",
        "c",
        "h",
        "o",
        "spc",
        "s",
        "e",
        "e",
        "n",
        "spc",
        "shift-dot",
        "slash",
        "d",
        "e",
        "v",
        "slash",
        "c",
        "o",
        "n",
        "s",
        "o",
        "l",
        "e",
        "ret",
    ):
        pressed = [{"type": "qcode", "data": code} for code in key.split("-")]
        guest.monitor({"execute": "send-key", "arguments": {"keys": pressed, "hold-time": 20}})
    guest.await_word("seen")
