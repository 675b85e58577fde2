# SPDX-License-Identifier: Apache-2.0
"""``./deploy/deb [REVISION]``: builds the Debian packages in build/deb with Debian's own tools.

The source distribution is unpacked, and deploy/debian becomes its folder debian. Then
dpkg-buildpackage builds the packages, and lintian checks them. The version is that of
``common.__version__``. The revision (1 by default) distinguishes packages of one version.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from email.utils import formatdate
from pathlib import Path

from common import __version__
from deploy import environment, packages
from deploy.progress import Failure, main, run, say, steps

FOLDER = packages.ROOT / "build/deb"
SDIST = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
ADVICE = "Fix the problem in the lines above."
CHANGES = """kilonova ({version}) {release}; urgency=medium

  * What has changed is in changelog.gz.

 -- {maintainer}  {date}
"""


def command(arguments: list[str]) -> int:
    """Install build requirements, build and check the packages, print their paths, and return 0.

    Args:
        arguments: The revision, or nothing for revision 1.

    Raises:
        Failure: The arguments are invalid, or a step failed.
    """
    revision = arguments[0] if arguments else "1"
    if len(arguments) > 1 or not re.fullmatch(r"[0-9][0-9A-Za-z.+~]*", revision):
        raise Failure(
            f"Invalid arguments: {' '.join(arguments)}",
            "Run ./deploy/deb [REVISION]. A revision begins with a digit.",
        )
    # All users may read the packaged files.
    os.umask(0o022)
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER / "build.log"
    with tempfile.TemporaryDirectory(prefix="kn-deb-") as temporary:
        tree = Path(temporary) / f"kilonova-{__version__}"
        steps(
            [
                (
                    "Debian packages",
                    lambda: packages.install(packages.for_deb(), log, kernel=False),
                ),
                ("Python environment", lambda: environment.make(environment.RUNTIME, log)),
                ("source", lambda: _unpack(tree, revision, log)),
                ("packages", lambda: _build(tree, log)),
                ("lintian", lambda: judge(FOLDER)),
            ]
        )
    say("\n".join(str(path) for path in sorted(FOLDER.glob("*.deb"))))
    return 0


def debian_version(version: str, revision: str) -> str:
    """Return the version of the packages for this machine's release.

    Pre-releases get a tilde, so that dpkg orders them before the release. The name of the release
    keeps the packages before possible packages of Debian, and its number orders upgrades from
    one release of Debian to the next: 0.1.0-1~deb12 comes before 0.1.0-1~deb13.

    Raises:
        Failure: The release is not supported.
    """
    system = packages.release()
    name = system["ID"].replace("debian", "deb") + system["VERSION_ID"]
    return re.sub(r"[.]?(a|b|rc|dev)(?=[0-9])", r"~\g<1>", version) + f"-{revision}~{name}"


def _unpack(tree: Path, revision: str, log: Path) -> None:
    """Build and unpack the source distribution, and add the folder debian with a changelog.

    Args:
        tree: Path of the unpacked source. The last part is the top folder of the archive.
        revision: The revision of the packages.
        log: The file that gets the programs' output.

    Raises:
        Failure: A program fails, the control file names no maintainer, or the release is not
            supported.
    """
    sdist = tree.parent / "sdist"
    run([environment.PYTHON, "-c", SDIST, sdist], ADVICE, log=log, cwd=packages.ROOT)
    for metadata in packages.ROOT.glob("*.egg-info"):
        # Python would read this metadata instead of the installed version's.
        shutil.rmtree(metadata)
    archive = next(sdist.glob("*.tar.gz"))
    run(["tar", "--extract", "--file", archive, "--directory", tree.parent], ADVICE, log=log)
    shutil.copytree(tree / "deploy/debian", tree / "debian")
    control = (tree / "debian/control").read_text()
    maintainer = re.search(r"^Maintainer: (.+)$", control, re.MULTILINE)
    if maintainer is None:
        raise Failure("deploy/debian/control names no maintainer.", ADVICE)
    (tree / "debian/changelog").write_text(
        CHANGES.format(
            version=debian_version(__version__, revision),
            release=packages.release()["VERSION_CODENAME"],
            maintainer=maintainer[1],
            date=formatdate(),
        )
    )


def _build(tree: Path, log: Path) -> None:
    for file in (*FOLDER.glob("*.deb"), *FOLDER.glob("*.changes"), *FOLDER.glob("*.buildinfo")):
        file.unlink()
    run(
        ["dpkg-buildpackage", "--build=binary", "--unsigned-changes", "--unsigned-buildinfo"],
        ADVICE,
        log=log,
        cwd=tree,
        env={"KILONOVA_PYTHON": str(environment.PYTHON)},
    )
    for file in tree.parent.glob("kilonova*_*"):
        shutil.move(file, FOLDER / file.name)


def judge(folder: Path) -> str:
    """Check the packages in the folder with lintian, and return its output.

    Raises:
        Failure: Lintian reports an error or a warning, or is not installed.
    """
    return run(
        [
            *("lintian", "--fail-on", "error,warning", "--allow-root", "--no-cfg"),
            *("--tag-display-limit", "0"),
            *folder.glob("*.changes"),
        ],
        "Fix the problems above. Intended ones belong in deploy/debian/lintian-overrides.*, with a reason.",
    ).strip()


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
