# SPDX-License-Identifier: Apache-2.0
"""An iSCSI target that needs no module of the kernel (tgt), with volumes as Cinder's LVM driver
gives them: a target for each volume, whose name has the volume's id."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.domain.json_types import JsonObject
from deploy.testing.servers import free_ports
from tests.waiting import await_true

PREFIX = "iqn.2010-10.org.openstack:volume-"
USER, PASSWORD = "someone", "s3cret/of,the=volume"
LUN = 1


class IscsiTarget:
    """A tgtd at ``address``, whose files are in ``folder``."""

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.portal = folder, f"{address}:{free_ports(1)}"
        self._environment = {**os.environ, "TGT_IPC_SOCKET": str(folder / "control")}
        self._count = 0
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["tgtd", "-f", "--iscsi", f"portal={self.portal}"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def is_up(self) -> bool:
        return self._tell("system", "show").returncode == 0

    def serve(self, volume_id: str, path: Path, password: str = "") -> JsonObject:
        """The connection to a volume in the words of Cinder's attachments."""
        self._count += 1
        name, number = f"{PREFIX}{volume_id}", str(self._count)
        self._do("target", "new", "--tid", number, "-T", name)
        self._do("logicalunit", "new", "--tid", number, "--lun", str(LUN), "-b", str(path))
        self._do("target", "bind", "--tid", number, "-I", "ALL")
        asks: JsonObject = {"auth_method": None}
        if password:
            user = f"{USER}{number}"
            self._do("account", "new", "--user", user, "--password", password)
            self._do("account", "bind", "--tid", number, "--user", user)
            asks = {"auth_method": "CHAP", "auth_username": user, "auth_password": password}
        return {
            "driver_volume_type": "iscsi",
            "target_discovered": False,
            "target_portal": self.portal,
            "target_iqn": name,
            "target_lun": LUN,
            "discard": False,
            **asks,
        }

    def exchange(self, volume_id: str, path: Path) -> None:
        """Another device is the unit from now on, as after a mistake of the array's."""
        target = str(self._number(volume_id))
        at = ("--tid", target, "--lun", str(LUN))
        self._do("logicalunit", "delete", *at)
        self._do("logicalunit", "new", *at, "-b", str(path))
        self._do("logicalunit", "update", *at, "--params", "scsi_id=another,scsi_sn=another")

    def sessions(self, volume_id: str) -> list[str]:
        """Initiators that are logged in to a volume's target."""
        shown = self._do("conn", "show", "--tid", str(self._number(volume_id)))
        return shown.splitlines()

    def _number(self, volume_id: str) -> int:
        lines = self._do("target", "show").splitlines()
        [found] = [one for one in lines if one.startswith("Target ") and one.endswith(volume_id)]
        return int(found.removeprefix("Target ").partition(":")[0])

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _do(self, mode: str, what: str, *about: str) -> str:
        done = self._tell(mode, what, *about)
        assert done.returncode == 0, (mode, what, about, done.stderr)
        return done.stdout

    def _tell(self, mode: str, what: str, *about: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["tgtadm", "--lld", "iscsi", "--mode", mode, "--op", what, *about],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )


@contextmanager
def running_target(folder: Path, address: str = "127.0.0.1") -> Iterator[IscsiTarget]:
    """One until the end of the block."""
    made = IscsiTarget(folder, address)
    try:
        await_true(made.is_up, 30, lambda: (folder / "log").read_text())
        yield made
    finally:
        made.end()
