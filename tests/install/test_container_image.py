# SPDX-License-Identifier: Apache-2.0
"""deploy/Containerfile, built: what its base image is taken to be here is the machines' system,
since no registry of images is asked."""

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
#: This machine's way to PyPI, which the recipe knows nothing of.
BORROWED = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
ADVICE = "See what buildah says above."
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """What a program prints in a container of the image."""
    folder = tmp_path_factory.mktemp("image")
    store = [f"--root={folder}/images", f"--runroot={folder}/run", "--storage-driver=overlay"]

    def buildah(*words: str | Path) -> str:
        return run(["buildah", *store, *words], ADVICE, timeout=1500)

    make_tree()
    [base] = {
        line.split()[1] for line in RECIPE.read_text().splitlines() if line.startswith("FROM ")
    }
    empty = buildah("from", "scratch").strip()
    buildah("add", "--quiet", empty, TREE, "/")
    buildah("commit", "--quiet", empty, base)
    build(folder, buildah)
    container = buildah("from", "--pull-never", "kilonova").strip()
    yield lambda *words: buildah("run", "--isolation=chroot", container, "--", *words)
    for one in (empty, container):
        buildah("rm", one)
    buildah("rmi", "--all", "--force")


def build(folder: Path, buildah: Callable[..., str]) -> None:
    """The recipe's own two commands, on a copy of the tree."""
    tree = folder / "tree"
    copytree(ROOT, tree, ignore=ignore_patterns("build", ".*", "__pycache__"))
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    run([*wheel, "--wheel-dir", tree / "dist", tree], ADVICE)
    borrowed = [f"--volume={path}:{path}:ro" for path in BORROWED if Path(path).exists()]
    buildah(
        *("build", "--pull-never", "--isolation=chroot", "--network=host", *borrowed),
        *("--file", RECIPE, "--tag", "kilonova", tree),
    )


@pytest.mark.parametrize("service", SERVICES)
def test_image_has_the_service(inside: Callable[..., str], service: str) -> None:
    assert inside(f"kilonova-{service}", "--version") == f"kilonova-{service} {__version__}\n"


def test_image_runs_as_a_user_without_rights_and_has_both_databases(
    inside: Callable[..., str],
) -> None:
    assert inside("id", "--user", "--name") == "kilonova\n"
    inside("python", "-c", "import psycopg, pymysql, common, compute_api, conductor, scheduler")
    assert "no broker" in inside("sh", "-c", "kilonova config check || true")
