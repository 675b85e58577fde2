# SPDX-License-Identifier: Apache-2.0
"""The Python interpreter that tests run as other users of the machine.

The tree and its .venv may be below a folder that only root may enter. A test that starts a program
as another user takes the program from here or copies it into a folder that the user may read.
"""

from __future__ import annotations

from pathlib import Path

#: Debian's Python with the standard library only. ./deploy/test installs it.
PYTHON_OF_ALL_USERS = Path("/usr/bin/python3")
