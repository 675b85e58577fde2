# SPDX-License-Identifier: Apache-2.0
"""The hypervisors that the driver's contract is tested on: memory, libvirt's test:///default, real
QEMU.

A rig holds a driver, an image that it can boot, and the questions that only a test asks. ``real``
guests run a kernel and take seconds; the others answer at once.
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
from functools import partial
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
from tests.waiting import await_true

if TYPE_CHECKING:
    from compute_agent.virt.libvirt.driver import LibvirtDriver

REPOSITORY = Path(__file__).resolve().parents[2]
NANO = Flavor("1", "m1.nano", 1, 128, 1)
QUIET = VerbContext(report_progress=lambda name: None, cancelled=lambda: False)
READY = "kilonova tiny guest: ready"
KEYS = [{"name": "mine", "type": "ssh", "data": "ssh-ed25519 AAAA me"}]
#: Where a real guest keeps its canary: on the raw disk, behind what the image fills.
CANARY_AT, SECTOR = 64 << 20, 512
#: User data that says what the disks hold, and plants a canary on the first when no disk has one.
CANARY = f"""#!/bin/sh
held() {{ dd if=/dev/$1 bs={SECTOR} skip={CANARY_AT // SECTOR} count=1 2> /dev/null | tr -d '\\0'; }}
for disk in vda vdb; do
    [ -b /dev/$disk ] && echo "$disk holds [$(held $disk)]"
done
[ -n "$(held vda)$(held vdb)" ] ||
    printf canary | dd of=/dev/vda bs={SECTOR} seek={CANARY_AT // SECTOR} conv=notrunc,fsync 2> /dev/null
"""
#: What a guest does all the time so that QEMU 7 migrates all it writes, emulated (decision 0021):
#: two processes take turns, and each turn, within milliseconds of the last, empties the TLB.
IN_TURNS = "for turn in 1 2; do ping -q -i 0.005 127.0.0.1 > /dev/null & done"
#: User data that counts on the console for as long as the guest goes on.
TICKS = f"""#!/bin/sh
{IN_TURNS}
(n=0; while usleep 100000; do n=$((n + 1)); echo "tick $n"; done) &
"""
#: User data that says which interfaces there are, in their order, whenever that changes.
NICS = """#!/bin/sh
(while :; do
    now=$(cat /sys/class/net/eth*/address 2> /dev/null | tr '\\n' ' ')
    [ "$now" = "$said" ] || echo "nics: ${now}end"
    said=$now
    usleep 200000
done) &
"""
#: What an agent must answer to libvirt, in few words; it says on the console what it was asked.
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
#: A guest emulated on a busy machine.
BOOT_SECONDS = 120


def guests_folder(prefix: str, inside: Path | None = None) -> Path:
    """One that guests' processes, which are not root's, can go through to their files."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    folder.chmod(0o711)
    return folder


class Rig:
    """One hypervisor. ``folder`` holds all its files; ``restart()`` is an agent that begins anew on
    it. ``daemon``: the folder of its own libvirtd, of real guests that may go on from saved
    memory."""

    #: User data -> the memory of a guest that was ready with it, by the hypervisor's URI.
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
        self.driver = make()
        self.content = content
        self.image = ImageRef(
            str(uuid.UUID(int=7)),
            disk_format,
            len(content),
            "sha512",
            hashlib.sha512(content).hexdigest(),
        )
        self.servers: list[str] = []
        self.bridges: list[str] = []
        failures.register(self)

    @property
    def real(self) -> bool:
        return self.kind == "qemu"

    @property
    def uri(self) -> str:
        """Of its own libvirtd."""
        assert self._daemon is not None, self.kind
        return libvirtd.uri(self._daemon)

    @property
    def has_console(self) -> bool:
        return self.kind != "test"

    def restart(self, **options: Any) -> Driver:
        """The agent begins anew, with these options where its kind has them."""
        self.driver.close()
        self.driver = self._make(**options)
        return self.driver

    def spec(self, *, user_data: str = "", **changed: Any) -> GuestSpec:
        """A new server that boots the rig's image, with a config drive."""
        server = str(uuid.uuid4())
        self.servers.append(server)
        values: dict[str, Any] = {
            "server": server,
            "fence": 1,
            "name": "web <1>",
            "flavor": NANO,
            "image": self.image,
            "config_drive": True,
            "user_data": base64.b64encode(user_data.encode()).decode() if user_data else None,
            "instance": {"hostname": "web-1", "keys": KEYS},
        }
        return GuestSpec(**{**values, **changed})

    def interface(self, bridge: str = "") -> Interface:
        """A port that is wired to a bridge: the one of this name, or one that is made now."""
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
        """A bridge that is not there yet, of this name or of any."""
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
        """The server's domain, as libvirt has it."""
        return cast("LibvirtDriver", self.driver)._libvirt.describe(server, stored)

    def nics(self, server: str) -> list[str]:
        """The MAC addresses of the active guest, as its hypervisor tells."""
        return [nic["mac_address"] for nic in self.driver.diagnostics(server)["nic_details"]]

    def await_nics(self, server: str, *interfaces: Interface) -> None:
        """Wait until a real guest that runs ``NICS`` has these interfaces, and no others, in this
        order."""
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
        for at in range(0, len(self.content), 1 << 20):
            yield self.content[at : at + (1 << 20)]

    def boot(self, *, ready: bool = False, **changed: Any) -> GuestSpec:
        """Make a guest; ``ready`` waits until a real one answers the power button."""
        spec = self.spec(**changed)
        self.driver.ensure_guest(spec, self.read_image, QUIET)
        if ready:
            self.await_boots(spec.server, 1)
        return spec

    def ready(self, user_data: str = "") -> GuestSpec:
        """A guest that is ready and has no interface. A real one may be made of what another had in
        its memory, for tests that do not ask who it is, how it booted or what it wrote: its user
        data must write on no disk."""
        if not self.real:
            return self.boot(user_data=user_data)
        if (self.uri, user_data) not in self._saved:
            first = self.boot(ready=True, user_data=user_data)
            self._saved[self.uri, user_data] = virt_saved.save(self, first)
        spec = self.spec(user_data=user_data)
        virt_saved.go_on(self, self._saved[self.uri, user_data], spec)
        return spec

    def console(self, server: str) -> str:
        return self.driver.console_output(server, 100_000) if self.has_console else ""

    def boots(self, server: str) -> int:
        """How often the guest began to boot, by its own words."""
        return self.console(server).count("guest: booting")

    def await_boots(self, server: str, count: int) -> None:
        """Wait until a real guest has booted that often and is ready."""
        if self.real:
            await_true(
                lambda: self.console(server).count(READY) >= count,
                BOOT_SECONDS,
                lambda: f"guest not ready: {self.console(server)[-2000:]}",
            )

    def boot_with_canary(self) -> GuestSpec:
        """A guest that is ready and has a canary on its disk. A real one has planted it by
        itself."""
        spec = self.boot(ready=True, user_data=CANARY)
        if not self.real:
            self.write_canary(spec.server)
        return spec

    def off_with_canary(self) -> GuestSpec:
        """A guest that is off, has a canary on its disk and has never run, which would cost
        seconds."""
        spec = self.boot(user_data=CANARY, paused=True)
        self.driver.ensure_stopped(spec.server, 1, 0, QUIET)
        self.write_canary(spec.server)
        return replace(spec, paused=False)

    def write_canary(self, server: str) -> None:
        """Onto the disk of a guest that does not write there, as a real one would."""
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
        """Whether the own disk has it: by the words of a real guest at its ``boot``-th boot (which
        calls it ``disk``), by a look from outside at any other."""
        if isinstance(self.driver, MemoryDriver):
            return "canary" in self.driver.host.guests[server].disk
        if not self.real:
            return holds_canary(self.folder / "instances" / server / "disk")
        self.await_boots(server, boot)
        said = self.console(server).split("guest: booting")[boot]
        assert f"{disk} holds [" in said, said
        return f"{disk} holds [canary]" in said

    def power_off_inside(self, server: str) -> None:
        """The guest stops by itself. A real one was given user data that does so."""
        if isinstance(self.driver, MemoryDriver):
            self.driver.host.power_off(server)

    def state(self, server: str) -> tuple[int, int] | None:
        """(power state, fence) as ``domains`` reports it, None when there is no domain."""
        found = [state for state in self.driver.domains() if state.server == server]
        assert len(found) <= 1
        return (found[0].power_state, found[0].fence) if found else None

    def files(self, server: str) -> list[Path]:
        """What the server has left on the disk."""
        return [path for path in self.folder.rglob("*") if server in str(path)]

    def clean(self) -> None:
        for server in self.servers:
            self.driver.ensure_absent(server, 1_000_000)
        for name in self.bridges:
            if Path("/sys/class/net", name).exists():
                subprocess.run(["ip", "link", "delete", name], check=True)
        self.driver.close()

    # --- what a failed test prints: failures.Diagnosable ---
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


def another(rig: Rig) -> ImageRef:
    """The same image under a checksum of another kind: it is fetched again."""
    return replace(
        rig.image, hash_algo="sha256", hash_value=hashlib.sha256(rig.content).hexdigest()
    )


def holds_canary(disk: Path) -> bool:
    """A look, at its first letter, on a disk that nobody writes."""
    look = f"read -P {ord('c')} {CANARY_AT} 1"
    told = subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", look, disk],
        capture_output=True,
        text=True,
        check=False,
    )
    return told.returncode == 0 and "verification failed" not in told.stdout


def no_options(folder: Path) -> dict[str, Any]:
    """As they are by default."""
    return {}


def of_kind(
    request: pytest.FixtureRequest,
    folder: Path,
    options: Callable[[Path], dict[str, Any]] = no_options,
) -> Iterator[Rig]:
    """The body of a fixture whose parameter says which hypervisor it is. ``options``: of libvirt's
    driver whose files are in a folder."""
    match request.param:
        case "memory":
            made = memory_rig(folder)
        case "test":
            pytest.importorskip("libvirt")
            made = libvirt_test_rig(folder, **options(folder))
        case _:
            daemon = request.getfixturevalue("private_libvirtd")
            short = guests_folder("kn-", daemon)  # the paths of sockets are
            made = qemu_rig(short, daemon, request.getfixturevalue("bootable"), **options(short))
    yield made
    made.clean()


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
    """The bootable image; made once for each kernel."""
    image = folder / "tiny.qcow2"
    subprocess.run([sys.executable, REPOSITORY / "deploy/images/tiny/build", image], check=True)
    return image
