# SPDX-License-Identifier: Apache-2.0
"""Policy files of operators: their effect on requests, and broken files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.log_lines import logged_fields

Cloud = Any
SHOW, INDEX = "os_compute_api:servers:show", "os_compute_api:servers:index"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def test_policy_context_is_admin_decides_admin_rights(
    make_cloud: Callable[..., Cloud], path: Path
) -> None:
    path.write_text('"context_is_admin": "role:service"\n')
    cloud = make_cloud(policy_file=str(path))
    server = cloud.create()
    cloud.set_state(server)
    assert cloud.call("GET", f"/servers/{server}", token="admin").status_code == 404
    assert cloud.call("GET", f"/servers/{server}", token="service").status_code == 200
    act = f"/servers/{server}/action"
    assert cloud.call("POST", act, {"lock": None}, token="service").status_code == 202
    assert cloud.call("POST", act, {"os-stop": None}).status_code == 409, (
        "it is locked, by an admin"
    )
    assert cloud.call("POST", act, {"unlock": None}).status_code == 403
    assert cloud.call("POST", act, {"os-stop": None}, token="service").status_code == 202


def test_policy_file_broken_at_runtime_keeps_last_rules_and_logs_once(
    make_cloud: Callable[..., Cloud], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(f'"{INDEX}": "!"\n')
    cloud = make_cloud(policy_file=str(path))
    assert cloud.call("GET", "/servers").status_code == 403
    path.write_text(f'"{INDEX}": "role:member or"\n')
    for _ in range(3):
        assert cloud.call("GET", "/servers").status_code == 403
        assert cloud.call("GET", "/servers/detail").status_code == 200
    assert [record.levelname for record in caplog.records if "policy" in record.name] == ["ERROR"]
    [fields] = logged_fields(
        caplog, "the policy file has changed and is invalid, so the old rules stay in force"
    )
    assert str(fields["problem"]).startswith(f"{path}:1: ")
    path.write_text("")
    assert cloud.call("GET", "/servers").status_code == 200


@pytest.mark.parametrize(
    ("section", "module"),
    [("api", "compute_api.compute.service"), ("placement", "compute_api.placement.service")],
)
def test_process_with_broken_policy_file_exits_78_with_one_line(
    tmp_path: Path, path: Path, section: str, module: str
) -> None:
    path.write_text('"a": "@"\n"b": "role:member or"\n')
    (tmp_path / "kilonova.conf").write_text(
        f"[database]\nurl = sqlite:///{tmp_path}/k.db\n[{section}]\npolicy_file = policy.yaml\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KILONOVA_CONF": str(tmp_path / "kilonova.conf")},
    )
    # The unit does not restart the process after this code.
    assert result.returncode == 78
    [line] = result.stderr.splitlines()
    assert line.startswith(
        f"kilonova-{section}: [{section}] policy_file {path}:2: b: 'role:member or' cannot be"
    )
