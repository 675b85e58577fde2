# SPDX-License-Identifier: Apache-2.0
"""Print which files one request runs through: ``python -m tests.bench.reading``.

* A create, from its handler to its answer. It names an image, a key pair, a group, a network, a
  volume and an Idempotency-Key.
* A resize until it is confirmed, in conductor, scheduler and agent. Functions that an idle cloud
  calls are left out.

Both follow an earlier request, so that the single lookups of a process do not count. A return is
a function in a file that the reader has left before. The program has no assertions.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType

from compute_api.compute.routes import ROUTES
from tests.api.conftest import IMAGE, PROJECT, TOKENS
from tests.api.conftest import Cloud as ApiCloud
from tests.api.networks import Networks
from tests.api.volumes import add_volume_service
from tests.workflows.moves import boot_server, create_cloud
from tests.workflows.scenarios import ask
from tests.workflows.simulator import Cloud

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "compute_api", "conductor", "scheduler", "compute_agent")
#: A function of the product: its file below ROOT, and its qualified name.
Function = tuple[str, str]


@contextmanager
def record_calls(start: CodeType | None = None) -> Iterator[dict[Function, None]]:
    """Yield the functions of the product in the order of their first calls.

    Args:
        start: Record only while this function runs. None records from now on.
    """
    functions: dict[Function, None] = {}
    folders = tuple(f"{ROOT / package}/" for package in PACKAGES)
    recording = start is None

    def record(frame: FrameType, event: str, argument: object) -> None:
        nonlocal recording
        code = frame.f_code
        if code is start and event in ("call", "return"):
            recording = event == "call"
        is_named = not code.co_name.startswith("<")
        if event == "call" and recording and is_named and code.co_filename.startswith(folders):
            path = str(Path(code.co_filename).relative_to(ROOT))
            functions.setdefault((path, code.co_qualname))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield functions
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def record_create() -> list[Function]:
    """Return the functions that a create calls."""
    projects = {token: project for token, (_, project, _) in TOKENS.items()}
    with tempfile.TemporaryDirectory() as folder:
        cloud = ApiCloud(f"sqlite:///{folder}/api.db", "secret", Networks(projects))
        cloud.furnish()
        add_volume_service(cloud)
        network = cloud.services.networks.add_network("net", PROJECT)
        cloud.call("POST", "/os-keypairs", {"keypair": {"name": "key"}})
        group = cloud.call(
            "POST",
            "/os-server-groups",
            {"server_group": {"name": "group", "policies": ["affinity"]}},
        ).json["server_group"]["id"]
        server = {
            "name": "vm",
            "flavorRef": "1",
            "imageRef": IMAGE,
            "key_name": "key",
            "metadata": {"key": "value"},
            "networks": [{"uuid": network}],
            "block_device_mapping_v2": [
                {
                    "uuid": IMAGE,
                    "boot_index": 0,
                    "source_type": "image",
                    "destination_type": "local",
                },
                {
                    "boot_index": -1,
                    "source_type": "blank",
                    "destination_type": "volume",
                    "volume_size": 1,
                },
            ],
        }
        body = {"server": server, "os:scheduler_hints": {"group": group}}
        [handler] = {
            route.handler for route in ROUTES if (route.method, route.path) == ("POST", "/servers")
        }
        cloud.call("POST", "/servers", body, mv="2.40", headers={"Idempotency-Key": "first"})
        with record_calls(handler.__code__) as functions:
            answer = cloud.call(
                "POST", "/servers", body, mv="2.40", headers={"Idempotency-Key": "second"}
            )
        cloud.store.close()
    assert answer.status_code == 202, answer.text
    return list(functions)


def record_resize() -> list[Function]:
    """Return the functions that a resize calls and an idle cloud does not."""
    cloud = create_cloud()
    cloud.watcher = lambda: None
    first, second = boot_server(cloud, name="first"), boot_server(cloud)
    _resize(cloud, first)
    with record_calls() as idle:
        for seconds in (1, 10, 100, 1000):
            cloud.time.pass_by(seconds)
            cloud.settle()
            cloud.round()
    with record_calls() as functions:
        _resize(cloud, second)
    cloud.store.close()
    return [function for function in functions if function not in idle]


def _resize(cloud: Cloud, server: str) -> None:
    for key in ("resize", "confirmResize"):
        ask(cloud, server, key)
        cloud.settle()


def print_table(title: str, functions: list[Function]) -> None:
    """Print a line for each file in the order in which the reader enters it, and the sums."""
    stays = [path for path, _ in groupby(functions, key=lambda function: function[0])]
    files = list(dict.fromkeys(stays))
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in files}
    print(
        f"{title}: {len(files)} files with {sum(lines.values())} lines, {len(functions)} functions, "
        f"{len(stays) - len(files)} returns"
    )
    print(f"  {'lines':>6} {'functions':>9} {'returns':>7}  file")
    for path in files:
        called = sum(function[0] == path for function in functions)
        print(f"  {lines[path]:>6} {called:>9} {stays.count(path) - 1:>7}  {path}")


def main() -> None:
    """Record both requests and print their tables."""
    print_table("create", record_create())
    print_table("resize", record_resize())


if __name__ == "__main__":
    main()
