# SPDX-License-Identifier: Apache-2.0
"""An iSCSI target in user space (tgt), with volumes as Cinder's LVM driver exports them.

Each volume has a separate target with the volume's id in the name.
"""

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
    """A running tgtd at ``address`` with all files in ``folder``."""

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
        return self._run_tgtadm("system", "show").returncode == 0

    def serve(self, volume_id: str, path: Path, password: str = "") -> JsonObject:
        """Export a volume and return the connection in the format of Cinder's attachments."""
        self._count += 1
        name, number = f"{PREFIX}{volume_id}", str(self._count)
        self._run_checked("target", "new", "--tid", number, "-T", name)
        self._run_checked("logicalunit", "new", "--tid", number, "--lun", str(LUN), "-b", str(path))
        self._run_checked("target", "bind", "--tid", number, "-I", "ALL")
        auth: JsonObject = {"auth_method": None}
        if password:
            user = f"{USER}{number}"
            self._run_checked("account", "new", "--user", user, "--password", password)
            self._run_checked("account", "bind", "--tid", number, "--user", user)
            auth = {"auth_method": "CHAP", "auth_username": user, "auth_password": password}
        return {
            "driver_volume_type": "iscsi",
            "target_discovered": False,
            "target_portal": self.portal,
            "target_iqn": name,
            "target_lun": LUN,
            "discard": False,
            **auth,
        }

    def exchange(self, volume_id: str, path: Path) -> None:
        """Put another device behind the unit, as after a mistake of the array."""
        target = str(self._number(volume_id))
        at = ("--tid", target, "--lun", str(LUN))
        self._run_checked("logicalunit", "delete", *at)
        self._run_checked("logicalunit", "new", *at, "-b", str(path))
        self._run_checked(
            "logicalunit", "update", *at, "--params", "scsi_id=another,scsi_sn=another"
        )

    def sessions(self, volume_id: str) -> list[str]:
        """Return the initiators that are logged in to a volume's target."""
        output = self._run_checked("conn", "show", "--tid", str(self._number(volume_id)))
        return output.splitlines()

    def _number(self, volume_id: str) -> int:
        lines = self._run_checked("target", "show").splitlines()
        [line] = [
            candidate
            for candidate in lines
            if candidate.startswith("Target ") and candidate.endswith(volume_id)
        ]
        return int(line.removeprefix("Target ").partition(":")[0])

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _run_checked(self, mode: str, operation: str, *options: str) -> str:
        result = self._run_tgtadm(mode, operation, *options)
        assert result.returncode == 0, (mode, operation, options, result.stderr)
        return result.stdout

    def _run_tgtadm(
        self, mode: str, operation: str, *options: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["tgtadm", "--lld", "iscsi", "--mode", mode, "--op", operation, *options],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )


@contextmanager
def running_target(folder: Path, address: str = "127.0.0.1") -> Iterator[IscsiTarget]:
    """Yield a target that runs until the end of the block."""
    target = IscsiTarget(folder, address)
    try:
        await_true(target.is_up, 30, lambda: (folder / "log").read_text())
        yield target
    finally:
        target.end()
