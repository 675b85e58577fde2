# SPDX-License-Identifier: Apache-2.0
"""The container image of deploy/Containerfile, built and run.

The base image is the system of the machines in this ring, because no registry is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from common import __version__
from deploy.packages import ROOT
from deploy.progress import run
from tests.install.machines import TREE, make_tree

RECIPE = ROOT / "deploy/Containerfile"
SERVICES = ("api", "conductor", "scheduler", "placement", "metadata", "console", "image-gateway")
#: Files with which pip reaches PyPI from this machine. The recipe does not contain them.
MOUNTED_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
ADVICE = "See what buildah says above."
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def run_in_container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Yield a function that runs a program in a container of the image, and returns the output."""
    folder = tmp_path_factory.mktemp("image")
    store = [f"--root={folder}/images", f"--runroot={folder}/run", "--storage-driver=overlay"]

    def run_buildah(*words: str | Path) -> str:
        return run(["buildah", *store, *words], ADVICE, timeout=1500)

    make_tree()
    [base] = {
        line.split()[1] for line in RECIPE.read_text().splitlines() if line.startswith("FROM ")
    }
    empty = run_buildah("from", "scratch").strip()
    run_buildah("add", "--quiet", empty, TREE, "/")
    run_buildah("commit", "--quiet", empty, base)
    build(folder, run_buildah)
    container = run_buildah("from", "--pull-never", "kilonova").strip()
    yield lambda *words: run_buildah("run", "--isolation=chroot", container, "--", *words)
    for container_name in (empty, container):
        run_buildah("rm", container_name)
    run_buildah("rmi", "--all", "--force")


def build(folder: Path, run_buildah: Callable[..., str]) -> None:
    """Run the two commands of the recipe's comment on a copy of the tree."""
    tree = folder / "tree"
    copytree(ROOT, tree, ignore=ignore_patterns("build", ".*", "__pycache__"))
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    run([*wheel, "--wheel-dir", tree / "dist", tree], ADVICE)
    mounts = [f"--volume={path}:{path}:ro" for path in MOUNTED_FILES if Path(path).exists()]
    run_buildah(
        *("build", "--pull-never", "--isolation=chroot", "--network=host", *mounts),
        *("--file", RECIPE, "--tag", "kilonova", tree),
    )


@pytest.mark.parametrize("service", SERVICES)
def test_container_image_has_program_of_service(
    run_in_container: Callable[..., str], service: str
) -> None:
    assert (
        run_in_container(f"kilonova-{service}", "--version")
        == f"kilonova-{service} {__version__}\n"
    )


def test_container_image_runs_unprivileged_with_both_database_drivers(
    run_in_container: Callable[..., str],
) -> None:
    assert run_in_container("id", "--user", "--name") == "kilonova\n"
    run_in_container(
        "python", "-c", "import psycopg, pymysql, common, compute_api, conductor, scheduler"
    )
    assert "no broker" in run_in_container("sh", "-c", "kilonova config check || true")
