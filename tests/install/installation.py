# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/install.md with the values of this cloud, and the operator's other tools.

Unlike on the page, Keystone's URL is plain HTTP, so the configuration allows plain text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from deploy.packages import ROOT
from tests.install import external_services
from tests.install.documentation import commands
from tests.install.machines import ADDRESSES, Machine

PAGE = ROOT / "docs/install.md"
CONTROLLER, SECOND, NODES = "controller", "second", ("node1", "node2")
PUBLIC = f"http://{ADDRESSES[CONTROLLER]}"
#: Values of the page -> the values of this cloud.
REPLACEMENTS = {
    "192.0.2.10": ADDRESSES[CONTROLLER],
    "192.0.2.11": ADDRESSES[SECOND],
    "192.0.2.20": ADDRESSES[NODES[0]],
    "192.0.2.21": ADDRESSES[NODES[1]],
    "https://keystone.example:5000/v3": external_services.ADMIN["OS_AUTH_URL"],
    "https://cloud.example": PUBLIC,
    "auth_url = $KEYSTONE": "auth_url = $KEYSTONE\nallow_plain_text = true",
}


def read_page_commands(heading: str, **words: str) -> str:
    """Return the commands of the page below a heading, with the values of this cloud."""
    script = commands(PAGE, heading)
    for word, value in {**REPLACEMENTS, **words}.items():
        script = script.replace(word, value)
    return script


def proxy(controller: Machine, *others: str) -> None:
    """Configure the operator's proxy in front of the controllers, here without TLS."""
    ports = {"api": 8774, "placement": 8778}
    pools = "".join(
        f"upstream {name} {{ {' '.join(f'server {address}:{port};' for address in ('127.0.0.1', *others))} }}\n"
        for name, port in ports.items()
    )
    controller.write(
        "/etc/nginx/sites-enabled/default",
        f"""{pools}
        server {{
            listen 80;
            client_max_body_size 0;
            proxy_set_header Host $host;
            location /v2.1 {{ proxy_pass http://api; }}
            location /placement/ {{ proxy_pass http://placement/; }}
        }}""",
    )
    controller.run("systemctl", "restart", "nginx")


def copy_packages(new_machine: Machine, packages: list[Path]) -> None:
    folder = new_machine.root / "root/kilonova"
    folder.mkdir(parents=True)
    for package in packages:
        shutil.copy(package, folder)


def run_client_for_json(controller: Machine, *words: str) -> Any:
    """Run a command of the OpenStack client, and return its JSON output."""
    return json.loads(controller.shell(f". /root/admin\nopenstack {' '.join(words)} -f json"))


def run_client(controller: Machine, words: str) -> None:
    controller.shell(f". /root/admin\nopenstack {words}")
