# SPDX-License-Identifier: Apache-2.0
"""``./deploy/docs``: builds the documentation as a site in build/site.

Every warning of Sphinx is a failure, for example a page that is in no list of pages, or a broken
link. The ring "lint" of deploy/test builds the same site.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from deploy import environment, packages
from deploy.progress import Failure, main, run, say, steps

FOLDER = packages.ROOT / "build/site"


def command(arguments: list[str]) -> int:
    """Install Sphinx, build the site in ``FOLDER``, and return 0.

    Raises:
        Failure: There are arguments, or a step failed.
    """
    if arguments:
        raise Failure(
            f"./deploy/docs takes no arguments: {' '.join(arguments)}", "Run ./deploy/docs."
        )
    with tempfile.TemporaryDirectory(prefix="kn-docs-") as temporary:
        log = Path(temporary) / "install.log"
        steps(
            [
                ("Python environment", lambda: environment.make(environment.TEST, log)),
                ("Sphinx", lambda: environment.make_docs(log)),
                ("pages", _make),
            ]
        )
    say(f"The site is in {FOLDER}. Open index.html.")
    return 0


def _make() -> str:
    return run(environment.docs_command(FOLDER), "Fix the problems in the lines above.")


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
