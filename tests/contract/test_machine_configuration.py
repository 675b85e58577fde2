# SPDX-License-Identifier: Apache-2.0
"""Started test servers ignore the configuration files of this machine's own servers."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from deploy.packages import ROOT

pytestmark = pytest.mark.slice("operations")
#: For each server: an invalid configuration file, in a folder that the package reads.
BROKEN = {
    "rabbitmq": ("/etc/rabbitmq", "conf.d/90-broken.conf", "no.such.key = 1\n"),
    "mariadb": ("/etc/mysql", "conf.d/90-broken.cnf", "[mariadbd]\nno_such_option=1\n"),
}
START = """
import sys
from pathlib import Path
from deploy.testing.servers import Servers
with Servers(Path(sys.argv[1])) as servers:
    servers.start(sys.argv[2])
"""


@pytest.mark.parametrize("kind", BROKEN)
def test_rabbitmq_and_mariadb_start_despite_invalid_config_of_machine(kind: str) -> None:
    etc, name, text = BROKEN[kind]
    script = (
        'mkdir -p "$1" && mount -t tmpfs none "$1" && mkdir -p "$(dirname "$1/$2")" && '
        'printf %s "$3" > "$1/$2" && shift 3 && exec "$@"'
    )
    # The server's user cannot enter pytest's folder.
    with tempfile.TemporaryDirectory(prefix="kn-etc-", dir="/tmp") as folder:
        command = [sys.executable, "-c", START, folder, kind]
        result = subprocess.run(
            ["unshare", "--mount", "sh", "-euc", script, "sh", etc, name, text, *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert result.returncode == 0, result.stdout + result.stderr
