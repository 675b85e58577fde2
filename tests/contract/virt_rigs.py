# SPDX-License-Identifier: Apache-2.0
"""The hypervisors of the driver tests: memory driver, libvirt's test:///default, and real QEMU.

A rig has a driver, a bootable image, and helpers that only tests need. ``real`` guests run a kernel
and take seconds. The others react at once.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from common.domain.models import Flavor, GuestSpec, ImageRef, Interface
from compute_agent.verb_context import VerbContext
from compute_agent.virt.driver import Driver
from compute_agent.virt.memory.driver import MemoryDriver
from compute_agent.virt.memory.state.host import MemoryHost
from deploy.one_machine.machine import libvirtd
from tests import evidence, failures
from tests.contract import virt_saved
from tests.contract.virt_saved import Saved
from tests.mini_image import assemble
from tests.waiting import await_true

if TYPE_CHECKING:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

REPOSITORY = Path(__file__).resolve().parents[2]
NANO = Flavor("1", "m1.nano", 1, 128, 1)
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)
#: The last line of a boot, by both kinds of real guests.
READY = "guest: ready"
KEYS = [{"name": "mine", "type": "ssh", "data": "ssh-ed25519 AAAA me"}]
#: The place of a real guest's canary: on the raw disk, behind the content of the image.
CANARY_AT, SECTOR = 64 << 20, 512
#: User data that prints the canaries of the disks, and writes a canary to the first disk if both
#: have none.
CANARY = f"""#!/bin/sh
held() {{ dd if=/dev/$1 bs={SECTOR} skip={CANARY_AT // SECTOR} count=1 2> /dev/null | tr -d '\\0'; }}
for disk in vda vdb; do
    [ -b /dev/$disk ] && echo "$disk holds [$(held $disk)]"
done
[ -n "$(held vda)$(held vdb)" ] ||
    printf canary | dd of=/dev/vda bs={SECTOR} seek={CANARY_AT // SECTOR} conv=notrunc,fsync 2> /dev/null
"""
#: A load that makes QEMU 7 migrate all written memory under emulation (decision 0021). Two
#: processes alternate within milliseconds, and each switch empties the TLB.
#: This takes a third of a processor, so only guests that migrate have this load.
IN_TURNS = """for turn in 1 2; do
    (mkfifo /run/turn$turn; exec 3<> /run/turn$turn; while :; do read -t 0.005 never <&3; done) &
done"""
#: A command that waits, for user data. A program like usleep would cost a new process, which an
#: emulated guest starts slowly.
PAUSE_TENTH = "{ [ -e /run/pause ] || mkfifo /run/pause; read -t 0.1 never <> /run/pause; }"
_COUNT = f'(n=0; while :; do {PAUSE_TENTH}; n=$((n + 1)); echo "tick $n"; done) &'
#: User data that counts on the console as long as the guest runs.
TICKS = f"#!/bin/sh\n{_COUNT}\n"
#: The same for a guest that migrates while it runs.
MIGRATING_TICKS = f"#!/bin/sh\n{IN_TURNS}\n{_COUNT}\n"
#: User data that prints the interfaces in their order after each change.
NICS = """#!/bin/sh
(while :; do
    now=$(cat /sys/class/net/eth*/address 2> /dev/null | tr '\\n' ' ')
    [ "$now" = "$said" ] || echo "nics: ${now}end"
    said=$now
    usleep 200000
done) &
"""
#: A minimal guest agent for libvirt, which prints each request on the console.
AGENT = r"""#!/bin/sh
answer() {
    # There is nothing to read until the host has opened its end.
    while :; do
        read -r asked || { usleep 50000; continue; }
        case $asked in
        *guest-sync*) said=$(echo "$asked" | sed 's/.*"id": *\([0-9]*\).*/\1/') ;;
        *fsfreeze-freeze*) said=1; echo "agent: frozen" > /dev/console ;;
        *fsfreeze-thaw*) said=1; echo "agent: thawed" > /dev/console ;;
        *set-user-password*nobody*) echo '{"error": {"class": "GenericError", "desc": "not s3cret"}}'; continue ;;
        *set-user-password*) said='{}'; secret=$(echo "$asked" | sed 's/.*"password": *"\([^"]*\)".*/\1/')
            echo "agent: password is $(echo "$secret" | base64 -d)" > /dev/console ;;
        *) said='{}' ;;
        esac
        echo "{\"return\": $said}"
    done
}
(for port in /dev/vport*p1; do answer <> "$port" >&0; done) &
"""
#: enough for an emulated guest on a busy machine
BOOT_SECONDS = 120


def guests_folder(prefix: str, inside: Path | None = None) -> Path:
    """Create a folder that guest processes, which are not root, can traverse to their files."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    folder.chmod(0o711)
    return folder


class Rig:
    """One hypervisor.

    ``folder`` contains all files. ``restart()`` starts a new agent on them. ``daemon`` is the
    folder of its own libvirtd, for real guests that may be restored from saved memory.

    Attributes:
        image: The image that guests boot. A real guest has no operating system
            (tests/mini_image.py).
        linux_image: The image of guests with user data, and of guests that must react to unplugged
            devices. Boots real guests with an operating system, slowly.
    """

    #: (URI of the hypervisor, user data) -> saved memory of a guest that was ready with it.
    _saved: ClassVar[dict[tuple[str, str], Saved]] = {}

    def __init__(
        self,
        kind: str,
        folder: Path,
        make: Callable[..., Driver],
        content: bytes,
        disk_format: str,
        daemon: Path | None = None,
    ) -> None:
        self.kind, self.folder, self._make, self._daemon = kind, folder, make, daemon
        if self.real:
            folder.mkdir(exist_ok=True)
            (folder / "kvm.json").write_text(probe_kvm())
        self.driver = make()
        self.linux_image = self.image = describe_image(7, disk_format, content)
        self.content, self._contents = content, {self.image.id: content}
        if self.real:
            self.content = assemble()
            self.image = describe_image(8, "qcow2", self.content)
            self._contents[self.image.id] = self.content
        self.servers: list[str] = []
        self.bridges: list[str] = []
        failures.register(self)

    @property
    def real(self) -> bool:
        return self.kind == "qemu"

    @property
    def uri(self) -> str:
        """The URI of the rig's own libvirtd."""
        assert self._daemon is not None, self.kind
        return libvirtd.uri(self._daemon)

    @property
    def has_console(self) -> bool:
        return self.kind != "test"

    def restart(self, **options: Any) -> Driver:
        """Start the agent again, with these options if supported."""
        self.driver.close()
        self.driver = self._make(**options)
        return self.driver

    def spec(self, *, user_data: str = "", **changed: Any) -> GuestSpec:
        """Return the spec of a new server with a config drive.

        The server boots ``linux_image`` if there are user data, otherwise ``image``.
        """
        server = str(uuid.uuid4())
        self.servers.append(server)
        values: dict[str, Any] = {
            "server": server,
            "fence": 1,
            "name": "web <1>",
            "flavor": NANO,
            "image": self.linux_image if user_data else self.image,
            "config_drive": True,
            "user_data": base64.b64encode(user_data.encode()).decode() if user_data else None,
            "instance": {"hostname": "web-1", "keys": KEYS},
        }
        return GuestSpec(**{**values, **changed})

    def interface(self, bridge: str = "") -> Interface:
        """Return a port that is wired to this bridge, or to a new one."""
        if not bridge:
            bridge = self.name_bridge()
            self.make_bridge(bridge)
        port = str(uuid.uuid4())
        return Interface(
            port,
            mac=f"fa:16:3e:{port[0:2]}:{port[2:4]}:{port[4:6]}",
            vif_type="bridge",
            bridge=bridge,
            device=f"tap{port[:11]}",
            mtu=1450,
        )

    def name_bridge(self, name: str = "") -> str:
        """Return the name of a bridge that does not exist yet."""
        self.bridges.append(name or f"kv-{uuid.uuid4().hex[:11]}")
        if isinstance(self.driver, MemoryDriver):
            self.driver.host.missing_bridges.add(self.bridges[-1])
        return self.bridges[-1]

    def make_bridge(self, name: str) -> None:
        if isinstance(self.driver, MemoryDriver):
            self.driver.host.missing_bridges.discard(name)
        if self.real:
            subprocess.run(["ip", "link", "add", "name", name, "up", "type", "bridge"], check=True)

    def describe(self, server: str, stored: bool = False) -> str:
        """Return the XML of the server's domain from libvirt."""
        return cast("LibvirtDriver", self.driver)._libvirt.describe(server, stored)

    def nics(self, server: str) -> list[str]:
        """Return the MAC addresses of the active guest from the hypervisor."""
        return [nic["mac_address"] for nic in self.driver.diagnostics(server)["nic_details"]]

    def await_nics(self, server: str, *interfaces: Interface) -> None:
        """Wait until a real guest with ``NICS`` has exactly these interfaces, in this order."""
        macs = [interface.mac for interface in interfaces]
        if self.real:
            await_true(
                lambda: (
                    self.console(server).split("nics: ")[-1].startswith(" ".join([*macs, "end"]))
                ),
                BOOT_SECONDS,
                lambda: f"not {macs}: {self.console(server)[-2000:]}",
            )
        assert self.nics(server) == macs

    def read_image(self, image: str) -> Iterator[bytes]:
        content = self._contents[image]
        for at in range(0, len(content), 1 << 20):
            yield content[at : at + (1 << 20)]

    def boot(self, *, ready: bool = False, **changed: Any) -> GuestSpec:
        """Create a guest. With ``ready``, wait until a real guest reacts to the power button."""
        spec = self.spec(**changed)
        self.driver.ensure_guest(spec, self.read_image, QUIET)
        if ready:
            self.await_boots(spec.server, 1)
        return spec

    def ready(self, user_data: str = "") -> GuestSpec:
        """Return a guest with an operating system that is ready and has no interface.

        A real guest may be restored from the saved memory of another. So use this only in tests
        that do not check identity, boot or disk. The user data must not write to a disk.
        """
        if not self.real:
            return self.boot(user_data=user_data)
        image = self.linux_image
        if (self.uri, user_data) not in self._saved:
            first = self.boot(ready=True, user_data=user_data, image=image)
            self._saved[self.uri, user_data] = virt_saved.save(self, first)
        spec = self.spec(user_data=user_data, image=image)
        virt_saved.go_on(self, self._saved[self.uri, user_data], spec)
        return spec

    def console(self, server: str) -> str:
        return self.driver.console_output(server, 100_000) if self.has_console else ""

    def boots(self, server: str) -> int:
        """Return the number of boots that the guest reported on the console."""
        return self.console(server).count("guest: booting")

    def await_boots(self, server: str, count: int) -> None:
        """Wait until a real guest has booted ``count`` times and is ready."""
        if self.real:
            await_true(
                lambda: self.console(server).count(READY) >= count,
                BOOT_SECONDS,
                lambda: f"guest not ready: {self.console(server)[-2000:]}",
            )

    def boot_with_canary(self) -> GuestSpec:
        """Return a ready guest with a canary on the disk. A real guest wrote the canary.

        With ``CANARY``, the guest also looks for a canary after a rebuild with ``linux_image``.
        """
        spec = self.boot(ready=True, user_data=CANARY, image=self.image)
        if not self.real:
            self.write_canary(spec.server)
        return spec

    def off_with_canary(self) -> GuestSpec:
        """Return a stopped guest with a canary on the disk. Without a boot, this saves seconds."""
        spec = self.boot(user_data=CANARY, image=self.image, paused=True)
        self.driver.ensure_stopped(spec.server, 1, 0, QUIET)
        self.write_canary(spec.server)
        return replace(spec, paused=False)

    def write_canary(self, server: str) -> None:
        """Write the canary to the disk of a stopped guest, where a real guest would write it."""
        if isinstance(self.driver, MemoryDriver):
            self.driver.host.write_file(server, "canary", "canary")
            return
        with tempfile.NamedTemporaryFile() as sector:
            sector.write(b"canary".ljust(SECTOR, b"\0"))
            sector.flush()
            write = f"write -s {sector.name} {CANARY_AT} {SECTOR}"
            subprocess.run(
                [
                    "qemu-io",
                    "-f",
                    "qcow2",
                    "-c",
                    write,
                    self.folder / "instances" / server / "disk",
                ],
                check=True,
                capture_output=True,
            )

    def has_canary(self, server: str, boot: int = 0, disk: str = "vda") -> bool:
        """Return True if the server's own disk has the canary.

        A real guest reports ``disk`` on the console at the ``boot``-th boot. The disk of any other
        guest is read from outside.
        """
        if isinstance(self.driver, MemoryDriver):
            return "canary" in self.driver.host.guests[server].disk
        if not self.real:
            return holds_canary(self.folder / "instances" / server / "disk")
        self.await_boots(server, boot)
        boot_output = self.console(server).split("guest: booting")[boot]
        assert f"{disk} holds [" in boot_output, boot_output
        return f"{disk} holds [canary]" in boot_output

    def power_off_inside(self, server: str) -> None:
        """Stop the guest from inside. The user data of a real guest does that."""
        if isinstance(self.driver, MemoryDriver):
            self.driver.host.power_off(server)

    def state(self, server: str) -> tuple[int, int] | None:
        """Return (power state, fence) as ``domains`` reports them, or None without a domain."""
        states = [state for state in self.driver.domains() if state.server == server]
        assert len(states) <= 1
        return (states[0].power_state, states[0].fence) if states else None

    def files(self, server: str) -> list[Path]:
        """Return the files and folders of the server that exist on the disk."""
        return [path for path in self.folder.rglob("*") if server in str(path)]

    def clean(self) -> None:
        for server in self.servers:
            self.driver.ensure_absent(server, 1_000_000)
        for name in self.bridges:
            if Path("/sys/class/net", name).exists():
                subprocess.run(["ip", "link", "delete", name], check=True)
        self.driver.close()

    # --- output of a failed test: failures.Diagnosable ---
    def bookmark(self) -> dict[Path, int]:
        return evidence.sizes(self._logs())

    def diagnosis(self, since: dict[Path, int]) -> dict[str, Callable[[], list[str]]]:
        if self._daemon is None:
            return {}
        return {
            f"{self._daemon}: logs since the test began": lambda: evidence.news(
                self._logs(), since
            ),
            **{
                f"console of {log.parent.name}": partial(evidence.tail, log)
                for log in sorted(self.folder.rglob("console.log"))
            },
        }

    def _logs(self) -> list[Path]:
        return (
            []
            if self._daemon is None
            else [*self._daemon.glob("libvirtd.out"), *sorted(self._daemon.glob("log/qemu/*.log"))]
        )


@cache
def probe_kvm() -> str:
    """Return the file in which a driver remembers whether KVM works.

    A machine whose KVM hangs needs five seconds for the probe, which each rig would repeat.
    """
    from compute_agent.virt.libvirt.host.host import kvm_works

    with tempfile.TemporaryDirectory() as folder:
        kvm_works(Path(folder))
        return Path(folder, "kvm.json").read_text()


def describe_image(number: int, disk_format: str, content: bytes) -> ImageRef:
    """Return the record of an image with this number as id."""
    key, digest = str(uuid.UUID(int=number)), hashlib.sha512(content).hexdigest()
    return ImageRef(key, disk_format, len(content), "sha512", digest)


def another(rig: Rig) -> ImageRef:
    """Return the same image with a checksum of another kind, so that hosts fetch it again."""
    return replace(
        rig.image, hash_algo="sha256", hash_value=hashlib.sha256(rig.content).hexdigest()
    )


def holds_canary(disk: Path) -> bool:
    """Return True if the canary sector of the disk starts with the canary's first letter."""
    look = f"read -P {ord('c')} {CANARY_AT} 1"
    result = subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", look, disk],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode == 0 and "verification failed" not in result.stdout


def no_options(folder: Path) -> dict[str, Any]:
    """Return the default options."""
    return {}


def of_kind(
    request: pytest.FixtureRequest,
    folder: Path,
    options: Callable[[Path], dict[str, Any]] = no_options,
) -> Iterator[Rig]:
    """Yield the rig of the fixture's parameter.

    ``options`` returns options of the libvirt driver for a folder.
    """
    match request.param:
        case "memory":
            rig = memory_rig(folder)
        case "test":
            pytest.importorskip("libvirt")
            rig = libvirt_test_rig(folder, **options(folder))
        case _:
            daemon = request.getfixturevalue("private_libvirtd")
            short = guests_folder("kn-", daemon)  # The paths of sockets must be short.
            rig = qemu_rig(short, daemon, request.getfixturevalue("bootable"), **options(short))
    yield rig
    rig.clean()


def memory_rig(folder: Path) -> Rig:
    return Rig(
        "memory",
        folder,
        lambda **options: MemoryDriver(
            MemoryHost(state_file=folder / "guests", read_images=True, **options)
        ),
        b"image" * 1000,
        "raw",
    )


def libvirt_test_rig(folder: Path, **options: Any) -> Rig:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    return Rig(
        "test",
        folder,
        lambda: LibvirtDriver("test:///default", folder, "test", **options),
        b"image" * 1000,
        "raw",
    )


def qemu_rig(folder: Path, daemon: Path, image: Path, **always: Any) -> Rig:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

    return Rig(
        "qemu",
        folder,
        lambda **options: LibvirtDriver(libvirtd.uri(daemon), folder, **always, **options),
        image.read_bytes(),
        "qcow2",
        daemon,
    )


def tiny_image(folder: Path) -> Path:
    """Build the bootable image unless there is one for this kernel. Return the path."""
    image = folder / "tiny.qcow2"
    subprocess.run([sys.executable, REPOSITORY / "deploy/images/tiny/build", image], check=True)
    return image
