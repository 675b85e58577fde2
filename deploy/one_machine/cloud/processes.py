# SPDX-License-Identifier: Apache-2.0
"""The processes of one cloud, in the order of their start: what each is called, its command and its
log.

Used by deploy/one_machine/cloud/lifecycle.py. A host has an agent, with the driver libvirt a
libvirtd of its own, and when the cloud has networks a host part of the network service; those of a
further host end in its number: "agent-2". A host with a namespace has all of them in it; in a lab,
whose hosts all have one, the machine has a host part too: the gateway. No secret stands in a
command or in an environment.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from deploy.environment import VENV
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.broker import USER as BROKER_USER
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import GATEWAY, Cloud, numbered
from deploy.one_machine.cloud.configuration import ROLES
from deploy.one_machine.machine.libvirtd import HERE
from deploy.one_machine.machine.supervise import Program
from deploy.packages import ROOT

PYTHON = str(VENV / "bin/python")
#: What runs before the others, which would find nothing and wait.
NEIGHBOURS = ("epmd", "rabbitmq", "libvirtd")
#: Once in a cloud; each is a program of our own.
SERVICES = ("api", "conductor", "scheduler", "placement", "image-gateway")
NSENTER = "/usr/bin/nsenter"


def programs(cloud: Cloud) -> list[Program]:
    """All of them."""
    return [*_neighbours(cloud), *_standalone(cloud), *_own(cloud)]


def make_environment(cloud: Cloud, host: str | None = None, role: str = "") -> dict[str, str]:
    """Return the environment variables of the processes of a host or of a role.

    It has no proxy, because the processes call only programs of this machine. The digest changes
    with the configuration, so that the supervisor restarts processes whose configuration changed.
    """
    config = cloud.config(host, role)
    digest = hashlib.sha256(config.read_bytes() if config.exists() else b"").hexdigest()[:8]
    return {
        "PATH": f"{VENV}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(cloud.home),
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "KILONOVA_CONF": str(config),
        "KILONOVA_CONF_DIGEST": digest,
    }


def _neighbours(cloud: Cloud) -> Iterator[Program]:
    broker = Broker.of(cloud) if cloud.broker_url is None else None
    if broker is not None:
        for name, command in (("epmd", broker.mapper_command()), ("rabbitmq", broker.command())):
            yield Program(
                name,
                command,
                str(cloud.log(name)),
                str(broker.folder),
                broker.environment,
                BROKER_USER,
            )
    for number, host in enumerate(cloud.hosts, 1) if cloud.has_guests else ():
        network = [
            str(cloud.namespace(number) or HERE),
            host,
            cloud.host_address(number),
            str(certificates.of_qemu(cloud, host)),
        ]
        yield _program(
            cloud,
            numbered("libvirtd", number),
            [
                *_inside(cloud, number),
                sys.executable,
                str(ROOT / "deploy/one_machine/machine/libvirtd.py"),
                "serve",
                str(cloud.libvirt_folder(number)),
                *(network if cloud.is_joined else []),
            ],
        )


def _standalone(cloud: Cloud) -> Iterator[Program]:
    ports, here = cloud.ports, cloud.address
    asking = ["--auth-url", cloud.identity_url, "--password-file", str(cloud.secret("kilonova"))]
    yield _module(
        cloud,
        "identity",
        "identity",
        "--bind",
        f"{here}:{ports.identity}",
        "--db",
        cloud.identity_db,
    )
    yield _module(
        cloud,
        "image",
        "image",
        "--bind",
        f"{here}:{ports.image}",
        "--data",
        cloud.home / "image",
        *asking,
    )
    if cloud.volumes:
        yield _module(cloud, "volume", "volume", *_volume_options(cloud), *asking)
    if not cloud.has_networks:
        return
    yield _module(
        cloud,
        "network",
        "network",
        "--bind",
        f"{here}:{ports.network}",
        "--db",
        cloud.home / "data/network.db",
        "--vni-base",
        cloud.underlay.first_identifier,
        *asking,
        "--metadata-secret-file",
        cloud.secret("metadata"),
        *([] if cloud.has_guests else ["--no-hosts"]),
    )
    proof = certificates.of(cloud, certificates.CONTROL)
    parts = network_parts(cloud)
    for number, host in parts:
        yield _module(
            cloud,
            numbered("network-host", number),
            "network.host",
            "--host",
            host,
            "--state",
            cloud.network_folder(number),
            "--url",
            cloud.network_url,
            "--key-file",
            cloud.network_key(host),
            "--tunnel-address",
            cloud.underlay.address(number),
            "--vxlan-port",
            ports.network,
            *(["--external-gateway"] if number == parts[0][0] else []),
            "--metadata-url",
            cloud.metadata_url,
            *(["--metadata-ca-file", proof.ca] if proof else []),
            network=cloud.namespace(number),
        )


def _volume_options(cloud: Cloud) -> list[object]:
    """Servers on the machine itself open files; other hosts are served at its address."""
    proof = certificates.of_volumes(cloud)
    here, *more = [GATEWAY] if cloud.apart else cloud.hosts
    return [
        "--bind",
        f"{cloud.address}:{cloud.ports.volume}",
        "--data",
        cloud.volume_folder,
        "--host",
        here,
        *(word for host in more for word in ("--also-host", host)),
        *(["--export-address", cloud.address, "--tls-folder", proof] if proof else []),
    ]


def ending_exports(cloud: Cloud) -> list[str]:
    """The command that ends what serves volumes to other hosts."""
    return [
        PYTHON,
        "-m",
        "deploy.one_machine.services.volume",
        "end-exports",
        "--data",
        str(cloud.volume_folder),
    ]


def network_parts(cloud: Cloud) -> list[tuple[int, str]]:
    """Number and name of each host that has a part of the network service; 0 is the gateway of a
    lab."""
    if not (cloud.has_networks and cloud.has_guests):
        return []
    return [*([(0, GATEWAY)] if cloud.apart else []), *enumerate(cloud.hosts, 1)]


def _own(cloud: Cloud) -> Iterator[Program]:
    edge = {"metadata": cloud.has_networks, "console": cloud.has_guests}
    for name in (*SERVICES, *(name for name, wanted in edge.items() if wanted)):
        yield _program(
            cloud, name, [str(VENV / f"bin/kilonova-{name}")], role=name if name in ROLES else ""
        )
    for number, host in enumerate(cloud.hosts, 1):
        yield _program(
            cloud,
            numbered("agent", number),
            [*_inside(cloud, number), str(VENV / "bin/kilonova-agent")],
            host,
        )


def _inside(cloud: Cloud, number: int) -> list[str]:
    """What stands before a command so that it runs on a host with a namespace; other hosts' folders
    are not there."""
    network = cloud.namespace(number)
    if network is None:
        return []
    others = [
        str(folder(other))
        for other, _ in enumerate(cloud.hosts, 1)
        if other != number
        for folder in (cloud.state_folder, cloud.libvirt_folder)
    ]
    return [
        sys.executable,
        str(ROOT / "deploy/one_machine/machine/inside.py"),
        str(network),
        cloud.hosts[number - 1],
        str(cloud.underlay.boot_id(number)),
        *others,
        "--",
    ]


def of_host(cloud: Cloud, number: int) -> list[str]:
    """The names of those that work for one host alone."""
    own = {numbered(name, number) for name in ("libvirtd", "network-host", "agent")}
    return [program.name for program in programs(cloud) if program.name in own]


def cleaning(cloud: Cloud, number: int) -> list[str]:
    """The command that removes all that the part of the network service on the machine ever
    made."""
    return [
        PYTHON,
        "-m",
        "deploy.one_machine.services.network.host",
        "clean",
        "--state",
        str(cloud.network_folder(number)),
    ]


def _module(
    cloud: Cloud, name: str, module: str, *arguments: object, network: Path | None = None
) -> Program:
    """One of the standalone services, in this network namespace."""
    return _program(
        cloud,
        name,
        [
            *([NSENTER, f"--net={network}"] if network else []),
            PYTHON,
            "-m",
            f"deploy.one_machine.services.{module}",
            "serve",
            *map(str, arguments),
        ],
    )


def _program(
    cloud: Cloud, name: str, command: list[str], host: str | None = None, role: str = ""
) -> Program:
    return Program(
        name, command, str(cloud.log(name)), str(ROOT), make_environment(cloud, host, role)
    )
