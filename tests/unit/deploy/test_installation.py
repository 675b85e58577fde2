# SPDX-License-Identifier: Apache-2.0
"""The files that ``pip install`` puts into a virtual environment.

These include all data files that programs read at run time.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from setuptools import Distribution

ROOT = Path(__file__).resolve().parents[3]
#: Data files that the programs of units, or ``kilonova``, read at run time.
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
def list_installed_files() -> set[str]:
    """Return all installed files, relative to the folder of packages."""
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files([str(ROOT / "setup.cfg")])
    # With this option setuptools would read a manifest, and write one.
    distribution.include_package_data = False
    distribution.get_command_obj("build").build_lib = "lib"
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    return {
        str(Path(name).relative_to(build.build_lib))
        for name in build.get_outputs(include_bytecode=False)
    }


@pytest.mark.parametrize("form", READ)
def test_pip_install_includes_data_files_of_programs(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    needed = {str(path.relative_to(ROOT)) for path in ROOT.glob(form)}
    assert needed, "the folder has another name now"
    assert needed - list_installed_files() == set()
