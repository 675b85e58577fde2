# SPDX-License-Identifier: Apache-2.0
"""A program for a fork of the supervisor, which writes where it runs and then sleeps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Print facts about this process. Without the argument "stay" then end with status 3."""
    facts = {
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "is_leader": os.getsid(0) == os.getpid(),
        "input": os.readlink("/proc/self/fd/0"),
        "title": Path("/proc/self/cmdline").read_text().rstrip("\0 "),
        "has_sqlalchemy": "sqlalchemy" in sys.modules,
    }
    print(json.dumps(facts))
    if "stay" not in sys.argv:
        sys.exit(3)
    # The supervisor ends this process.
    time.sleep(600)


if __name__ == "__main__":
    main()
