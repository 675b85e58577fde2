# SPDX-License-Identifier: Apache-2.0
"""What ``pip install`` puts into a virtual environment, which the units expect, has all that
programs read beside their modules."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[3]
#: Read by programs that units start, or by ``kilonova``.
READ = (
    "common/store/upgrades/versions/*.py",
    "compute_api/console/*.html",
    "deploy/samples/*",
    "deploy/systemd/*",
    "deploy/sysusers.d/*",
    "deploy/tmpfiles.d/*",
    "deploy/modules-load.d/*",
)


@cache
def installed() -> set[str]:
    """All files, relative to the folder of packages."""
    made = Distribution({"script_name": "setup.py"})
    made.parse_config_files([str(ROOT / "setup.cfg")])
    made.include_package_data = False  # which would ask a manifest, and write one
    made.get_command_obj("build").build_lib = "lib"
    build = made.get_command_obj("build_py")
    build.ensure_finalized()
    return {
        str(Path(name).relative_to(build.build_lib))
        for name in build.get_outputs(include_bytecode=False)
    }


@pytest.mark.parametrize("form", READ)
def test_what_programs_read_is_installed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    needed = {str(path.relative_to(ROOT)) for path in ROOT.glob(form)}
    assert needed, "the folder has another name now"
    assert needed - installed() == set()
