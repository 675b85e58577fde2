# SPDX-License-Identifier: Apache-2.0
"""``./deploy/up``: from an empty Debian 12 or 13 to a running guest, in seventeen repeatable steps.

The first three steps run on the system's Python and make the virtual environment, in which the
others run. ``Cloud.from_environment`` lists the environment variables. The command asks no
questions.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deploy import environment, packages
from deploy.environment import VENV
from deploy.one_machine.cloud import lifecycle, processes
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.cloud.process_control import find_supervisor
from deploy.one_machine.preflight import check
from deploy.progress import UMASK, Failure, main, run, say, steps

# The import needs the virtual environment, which the first steps make.
if TYPE_CHECKING:
    from deploy.one_machine.seed import Seed

TOTAL, CONTINUED = 17, "--continued"
Step = tuple[str, Callable[[], str | None]]


def run_first_steps(cloud: Cloud, *command: str) -> int:
    """Run steps 1 to 3, then the others in the virtual environment, and return their exit status.

    The others run in a process of their own, which prints its failures itself.

    Args:
        cloud: The cloud.
        command: The module of deploy.one_machine that runs the other steps, and its arguments.

    Raises:
        Failure: One of the steps 1 to 3 failed.
    """
    log = cloud.log("install")
    steps(
        [
            ("Checks of this machine", lambda: check(cloud)),
            ("Debian packages", lambda: packages.install(packages.for_up(), log)),
            ("Python environment", lambda: environment.make(environment.RUNTIME, log)),
        ],
        total=TOTAL,
    )
    sys.stdout.flush()
    done = subprocess.run(
        [environment.PYTHON, "-m", f"deploy.one_machine.{command[0]}", *command[1:], CONTINUED],
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ,
    )
    return done.returncode


def run_later_steps(cloud: Cloud) -> str:
    """Run steps 4 to 17 and return the final message.

    Raises:
        Failure: A step failed.
    """
    from deploy.one_machine.connectivity import Connectivity
    from deploy.one_machine.seed import Seed

    os.umask(UMASK)
    seed = Seed(cloud)
    connectivity = Connectivity(seed)
    later_steps: list[Step] = [
        ("Folders, secrets and configuration", lambda: prepare(cloud)),
        ("Database and keys of hosts", lambda: upgrade(cloud)),
        ("First rows of the identity service", lambda: bootstrap(cloud)),
        ("Processes", lambda: _launch(cloud, seed)),
        ("Services answer", lambda: await_services(cloud)),
        ("Host", seed.host),
        ("Flavors", seed.flavors),
        ("User and project", seed.tenant),
        ("Tiny image", seed.image),
        ("Networks", connectivity.networks),
        ("Key pair and security rules", connectivity.access),
        ("First server, through the public API", lambda: seed.server(**connectivity.wanted())),
        ("Console of the guest", seed.console),
        ("Floating address and ssh", connectivity.login),
    ]
    steps(later_steps, first=4, total=TOTAL)
    screen = "\n  openstack console url show first" if cloud.has_guests else ""
    clouds_yaml, config = shlex.quote(str(cloud.clouds_yaml)), shlex.quote(str(cloud.config()))
    programs = shlex.quote(f"{VENV}/bin")
    return f"""
The cloud works. Next steps:
  export OS_CLIENT_CONFIG_FILE={clouds_yaml}
  export PATH=$PATH:{programs} NO_PROXY={cloud.address} OS_CLOUD=kilonova KILONOVA_CONF={config}
  openstack server list
  openstack server create --image tiny --flavor m1.nano {connectivity.options} vm1{screen}
  openstack --os-cloud kilonova-admin compute service list
  kilonova hosts{connectivity.line}
Logs are in {cloud.home}/log"""


def prepare(cloud: Cloud) -> str:
    """Make the cloud's folders, secrets, certificates and configuration, and return a note.

    Raises:
        Failure: RabbitMQ is not installed, or a running broker refuses the users.
    """
    lifecycle.prepare(cloud)
    return f"below {cloud.home}"


def upgrade(cloud: Cloud) -> str:
    """Upgrade the database, make missing keys of hosts, and return the upgrade's output.

    The key files of all hosts are written again.

    Raises:
        Failure: The upgrade fails.
    """
    from deploy.one_machine.cloud import host_keys

    note = run(
        [VENV / "bin/kilonova", "database", "upgrade"],
        "A failed upgrade changes nothing in the database. Correct the problem and run this again.",
        env={"KILONOVA_CONF": str(cloud.config())},
        log=cloud.log("database"),
    ).strip()
    host_keys.make(cloud)
    return note


def bootstrap(cloud: Cloud) -> None:
    """Write the first rows of the identity service, with the endpoints of the cloud's services.

    Endpoints of a network or block storage service that the cloud no longer has are deleted.

    Raises:
        Failure: The identity service's bootstrap command fails.
    """
    endpoints = {
        "identity": cloud.identity_url,
        "image": cloud.image_url,
        "compute": cloud.api_url,
        "placement": cloud.placement_url,
        **({"network": cloud.network_url} if cloud.has_networks else {}),
        **({"block-storage": cloud.volume_url} if cloud.volumes else {}),
    }
    command: list[str | Path] = [
        VENV / "bin/python",
        "-m",
        "deploy.one_machine.services.identity",
        "bootstrap",
        "--db",
        cloud.identity_db,
        "--admin-password-file",
        cloud.secret("admin"),
        "--service-password-file",
        cloud.secret("kilonova"),
    ]
    for kind, url in endpoints.items():
        command += ["--endpoint", f"{kind}={url}"]
    # A cloud that had these services at an earlier start loses their endpoints.
    for kind, is_there in (("network", cloud.has_networks), ("block-storage", cloud.volumes)):
        command += [] if is_there else ["--without", kind]
    run(command, "This is a bug; please report it.", log=cloud.log("identity-bootstrap"))


def _launch(cloud: Cloud, seed: Seed) -> str:
    running = find_supervisor(cloud) is not None
    if not running:
        seed.launched = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    lifecycle.launch(cloud)
    if running:
        return "the processes run already"
    return ", ".join(program.name for program in processes.programs(cloud))


def await_services(cloud: Cloud) -> str:
    """Wait until every HTTP service answers. Return a text with their names and the seconds.

    Raises:
        Failure: A service does not answer within 60 seconds.
    """
    began = time.monotonic()
    urls = {
        "identity": cloud.identity_url,
        "image": cloud.image_url,
        "network": cloud.network_url,
        "api": cloud.api_url + "/",
        "metadata": cloud.metadata_url,
        "console": cloud.console_url,
        "placement": cloud.placement_url,
        "image-gateway": cloud.image_gateway_url,
        "volume": cloud.volume_url,
    }
    names = [program.name for program in processes.programs(cloud) if program.name in urls]
    for name in names:
        lifecycle.await_http(cloud, name, urls[name])
    return f"{', '.join(names)} after {time.monotonic() - began:.1f} s"


def command(arguments: list[str]) -> int:
    """Run the steps of ./deploy/up and return the exit status.

    Args:
        arguments: [] for all steps, or [CONTINUED] for the steps in the virtual environment.

    Raises:
        Failure: The arguments are unknown, or a step failed.
    """
    if arguments not in ([], [CONTINUED]):
        raise Failure(
            f"./deploy/up takes no arguments: {' '.join(arguments)}",
            "Set KILONOVA_HOME or KILONOVA_PORT_BASE in the environment; see docs/one-machine.md.",
        )
    cloud = Cloud.from_environment()
    if not arguments:
        return run_first_steps(cloud, "up")
    say(f"{run_later_steps(cloud)}; stop everything with ./deploy/down")
    return 0


if __name__ == "__main__":
    sys.exit(main(lambda: command(sys.argv[1:])))
