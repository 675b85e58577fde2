# SPDX-License-Identifier: Apache-2.0
"""The samples that use Pacemaker's fencing as the proof for an evacuation.

The answers of stonith_admin and the variables of the alert were recorded with Pacemaker 2.1.5 of
Debian 12. The fence agent of that cluster always succeeded for node7 and always failed for stuck9.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.domain.models import HostInventory
from common.store.engine import Store
from common.store.hosts import hosts
from tests.schemas import upgrade

SAMPLES = Path(__file__).resolve().parents[3] / "deploy/samples"
HISTORY = """<pacemaker-result api-version="2.25" request="stonith_admin --history node7 --verbose
  --output-as=xml">
  <list name="fencing history" count="1">
    <fence_event action="{action}" target="{target}" client="stonith_admin.22065" origin="ctl1"
      status="{status}" delegate="{delegate}" completed="2026-11-26 22:21:37Z"/>
  </list>
  <status code="0" message="OK"/>
</pacemaker-result>
"""
OLDER = """    <fence_event action="reboot" target="node7" client="stonith_admin.21691" origin="ctl1"
      status="success" delegate="ctl1" completed="2026-11-26 22:20:57Z"/>
"""
FENCED = HISTORY.format(action="off", target="node7", status="success", delegate="ctl1")
NOT_FENCED = """<pacemaker-result api-version="2.25" request="stonith_admin --history node7 --verbose
  --output-as=xml">
  <list name="fencing history" count="0"/>
  <status code="0" message="OK"/>
</pacemaker-result>
"""
NOT_CONNECTED = """<pacemaker-result api-version="2.25" request="stonith_admin --history node7 --verbose
  --output-as=xml">
  <status code="102" message="Not connected">
    <errors>
      <error>Could not connect to fencer: Transport endpoint is not connected</error>
    </errors>
  </status>
</pacemaker-result>
"""
BEFORE, AFTER = "2026-11-26T22:21:36Z", "2026-11-26T22:21:37Z"
Hook = Callable[..., subprocess.CompletedProcess[str]]


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def run_hook(tmp_path: Path) -> Hook:
    """Return a function that runs the hook for node7 with an answer of stonith_admin."""

    def run(
        history: str, heard: str | None = BEFORE, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "history").write_text(history)
        write_program(
            tmp_path / "stonith_admin",
            f'[ "$*" = "--history node7 --verbose --output-as=xml" ] && cat {tmp_path}/history\nexit {status}',
        )
        if heard is not None:
            hosts_shown = [{"name": "node7", "last_heard": heard}] if heard != "unknown" else []
            (tmp_path / "hosts").write_text(json.dumps(hosts_shown))
            write_program(tmp_path / "kilonova", f"cat {tmp_path}/hosts; exit 1")
        return subprocess.run(
            [sys.executable, SAMPLES / "fencing-pacemaker", "node7"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )

    return run


@pytest.mark.parametrize(
    ("action", "delegate"), [("off", "ctl1"), ("reboot", "ctl1"), ("off", "a human")]
)
def test_fencing_hook_sample_accepts_host_fenced_after_its_last_contact(
    run_hook: Hook, action: str, delegate: str
) -> None:
    history = HISTORY.format(action=action, target="node7", status="success", delegate=delegate)
    [event] = [line for line in history.splitlines(keepends=True) if "fence_event" in line]
    done = run_hook(history.replace(event, OLDER + event))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("history", "heard", "status", "reason"),
    [
        (FENCED, AFTER, 0, "was heard at 2026-11-26 22:21:37+00:00, and fenced before"),
        (FENCED, "", 0, "'' is no time"),
        (FENCED, "unknown", 0, "kilonova hosts knows no host node7"),
        (NOT_FENCED, BEFORE, 0, "Pacemaker has not fenced node7"),
        (FENCED.replace('"off"', '"on"'), BEFORE, 0, "has not fenced"),
        (FENCED.replace('"success"', '"failed"'), BEFORE, 0, "has not fenced"),
        (FENCED.replace('"success"', '"pending"'), BEFORE, 0, "has not fenced"),
        (FENCED.replace('target="node7"', 'target="node77"'), BEFORE, 0, "has not fenced"),
        (FENCED.replace("37Z", "37"), BEFORE, 0, "has no zone"),
        (FENCED, BEFORE, 124, "stonith_admin ended with 124"),
        (NOT_CONNECTED, BEFORE, 102, "Could not connect to fencer"),
        ("", BEFORE, 0, "no element found"),
    ],
)
def test_fencing_hook_sample_refuses_unproved_fencing_and_names_reason(
    run_hook: Hook, history: str, heard: str, status: int, reason: str
) -> None:
    done = run_hook(history, heard, status)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no proof that node7 is off: ") and reason in done.stderr


def test_fencing_hook_sample_reads_last_contact_from_kilonova_hosts(
    run_hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/k.db"
    (tmp_path / "kilonova.conf").write_text(f"[database]\nurl = {url}\n")
    monkeypatch.setenv("KILONOVA_CONF", str(tmp_path / "kilonova.conf"))
    write_program(
        tmp_path / "kilonova", f'exec {shlex.quote(sys.executable)} -m deploy.operator.main "$@"'
    )
    store = Store(url)
    upgrade(store)
    inventory = HostInventory("QEMU", 7002000, "", 4, 8192, 100)
    store.write(lambda tx: hosts.register(tx, "node7", "boot", inventory))
    store.close()
    done = run_hook(FENCED.replace("2026-", "2020-"), heard=None)
    assert (done.returncode, "was heard at" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("kind", "rc", "action", "expected"),
    [
        ("fencing", "0", "off", ["compute service set --down node7 nova-compute"]),
        ("fencing", "0", "reboot", ["compute service set --down node7 nova-compute"]),
        ("fencing", "0", "on", []),
        ("fencing", "-61", "off", []),
        ("node", "0", "off", []),
    ],
)
def test_pacemaker_alert_forces_down_only_fenced_host(
    tmp_path: Path, kind: str, rc: str, action: str, expected: list[str]
) -> None:
    calls = tmp_path / "calls"
    calls.touch()
    write_program(tmp_path / "openstack", f'shift 2; echo "$OS_CLIENT_CONFIG_FILE $*" >> {calls}')
    alert = {
        "CRM_alert_kind": kind,
        "CRM_alert_node": "node7",
        "CRM_alert_rc": rc,
        "CRM_alert_task": "st_notify_fence",
        "CRM_alert_desc": f"Operation {action} of node7 by ctl1 for stonith_admin.22212@ctl1: OK "
        "(ref=158dad4f-c8f9-41d3-bfc1-60805bf6ed56)",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    subprocess.run([SAMPLES / "pacemaker-forced-down"], env=alert, check=True, timeout=30)
    lines = calls.read_text().splitlines()
    assert lines == [f"/etc/kilonova/clouds.yaml {call}" for call in expected]
