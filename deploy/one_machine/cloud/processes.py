# SPDX-License-Identifier: Apache-2.0
"""The processes of one cloud in the order of their start: names, commands and logs.

deploy/one_machine/cloud/lifecycle.py uses this module. A host has an agent, a libvirtd if the
driver is libvirt, and a network agent if the cloud has networks. The processes of later hosts have
the host's number in their name, for example "agent-2". All processes of a host with a network
namespace run in it. In a lab all hosts have one, and the machine itself has a network agent as the
gateway. Invariant: no command and no environment contains a secret.
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
from deploy.one_machine.machine.preload import Entry
from deploy.one_machine.machine.supervise import Program
from deploy.packages import ROOT

PYTHON = str(VENV / "bin/python")
#: Prefixes of the programs that start first, because the others would fail and retry.
FIRST_PROGRAMS = ("epmd", "rabbitmq", "libvirtd")
#: Kilonova's processes that a cloud has once.
SERVICES = ("api", "conductor", "scheduler", "placement", "image-gateway")
#: The modules of the console scripts, as in setup.cfg.
MODULES = {
    "api": "compute_api.compute.service",
    "conductor": "conductor.service",
    "console": "compute_api.console.service",
    "image-gateway": "compute_api.image_gateway.service",
    "metadata": "compute_api.metadata.service",
    "placement": "compute_api.placement.service",
    "scheduler": "scheduler.service",
}
NSENTER = "/usr/bin/nsenter"


def programs(cloud: Cloud) -> list[Program]:
    """Return all programs of the cloud in the order of their start."""
    return [*_infrastructure_programs(cloud), *_service_programs(cloud), *_kilonova_programs(cloud)]


def make_environment(cloud: Cloud, host: str | None = None, role: str = "") -> dict[str, str]:
    """Return all environment variables of a process of the cloud. The broker's node has others.

    KILONOVA_CONF is the path from ``Cloud.config`` for this host and role. KILONOVA_CONF_DIGEST
    changes with the configuration file, so that the supervisor restarts processes with a changed
    configuration. There is no proxy, because the processes call only programs of this machine.

    Args:
        cloud: The cloud.
        host: The name of the host, or None for a process of the control plane.
        role: A role of ``configuration.ROLES``, or "".
    """
    config = cloud.config(host, role)
    digest = hashlib.sha256(config.read_bytes() if config.exists() else b"").hexdigest()[:8]
    return {
        "PATH": f"{VENV}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(cloud.home),
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        # As in the units of systemd: all threads of a process share two heaps of malloc.
        "MALLOC_ARENA_MAX": "2",
        "KILONOVA_CONF": str(config),
        "KILONOVA_CONF_DIGEST": digest,
    }


def _infrastructure_programs(cloud: Cloud) -> Iterator[Program]:
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
                *_inside_command(cloud, number),
                sys.executable,
                str(ROOT / "deploy/one_machine/machine/libvirtd.py"),
                "serve",
                str(cloud.libvirt_folder(number)),
                *(network if cloud.is_joined else []),
            ],
        )


def _service_programs(cloud: Cloud) -> Iterator[Program]:
    ports, address = cloud.ports, cloud.address
    authentication = [
        "--auth-url",
        cloud.identity_url,
        "--password-file",
        str(cloud.secret("kilonova")),
    ]
    yield _module(
        cloud,
        "identity",
        "identity",
        "--bind",
        f"{address}:{ports.identity}",
        "--db",
        cloud.identity_db,
    )
    yield _module(
        cloud,
        "image",
        "image",
        "--bind",
        f"{address}:{ports.image}",
        "--data",
        cloud.home / "image",
        *authentication,
    )
    if cloud.volumes:
        yield _module(cloud, "volume", "volume", *_volume_options(cloud), *authentication)
    if not cloud.has_networks:
        return
    yield _module(
        cloud,
        "network",
        "network",
        "--bind",
        f"{address}:{ports.network}",
        "--db",
        cloud.home / "data/network.db",
        "--vni-base",
        cloud.underlay.first_identifier,
        *authentication,
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
    """Return the options of the volume service.

    The hosts open the volumes' files, because they share the machine's file system. In a lab the
    hosts reach exports of the volumes at the machine's address instead.
    """
    proof = certificates.of_volumes(cloud)
    first_host, *other_hosts = [GATEWAY] if cloud.apart else cloud.hosts
    return [
        "--bind",
        f"{cloud.address}:{cloud.ports.volume}",
        "--data",
        cloud.volume_folder,
        "--host",
        first_host,
        *(word for host in other_hosts for word in ("--also-host", host)),
        *(["--export-address", cloud.address, "--tls-folder", proof] if proof else []),
    ]


def end_exports_command(cloud: Cloud) -> list[str]:
    """Return the command that ends the exports of volumes to other hosts."""
    return [
        PYTHON,
        "-m",
        "deploy.one_machine.services.volume",
        "end-exports",
        "--data",
        str(cloud.volume_folder),
    ]


def network_parts(cloud: Cloud) -> list[tuple[int, str]]:
    """Return number and name of each host with a network agent. A lab's gateway has number 0.

    The list is empty without networks or guests.
    """
    if not (cloud.has_networks and cloud.has_guests):
        return []
    return [*([(0, GATEWAY)] if cloud.apart else []), *enumerate(cloud.hosts, 1)]


def _kilonova_programs(cloud: Cloud) -> Iterator[Program]:
    optional_services = {"metadata": cloud.has_networks, "console": cloud.has_guests}
    for name in (
        *SERVICES,
        *(name for name, is_enabled in optional_services.items() if is_enabled),
    ):
        yield _program(
            cloud,
            name,
            [str(VENV / f"bin/kilonova-{name}")],
            role=name if name in ROLES else "",
            entry=Entry(MODULES[name]),
        )
    for number, host in enumerate(cloud.hosts, 1):
        yield _program(
            cloud,
            numbered("agent", number),
            [*_inside_command(cloud, number), str(VENV / "bin/kilonova-agent")],
            host,
            entry=Entry("compute_agent.service", place=_place(cloud, number)),
        )


def _inside_command(cloud: Cloud, number: int) -> list[str]:
    """Return the words to put before a command that runs on a host with a namespace, if any."""
    place = _place(cloud, number)
    inside = str(ROOT / "deploy/one_machine/machine/inside.py")
    return [sys.executable, inside, *place, "--"] if place else []


def _place(cloud: Cloud, number: int) -> list[str]:
    """Return the arguments of inside.py for a process of a host with a namespace.

    The process does not see the folders of other hosts. For a host without a namespace the list is
    empty.
    """
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
        str(network),
        cloud.hosts[number - 1],
        str(cloud.underlay.boot_id(number)),
        *others,
    ]


def of_host(cloud: Cloud, number: int) -> list[str]:
    """Return the names of the programs of one host: agent, libvirtd and network agent, if any."""
    own = {numbered(name, number) for name in ("libvirtd", "network-host", "agent")}
    return [program.name for program in programs(cloud) if program.name in own]


def clean_command(cloud: Cloud, number: int) -> list[str]:
    """Return the command that removes the devices and rules of a stopped network agent.

    The devices and rules are in the machine's own namespace. Number 0 is the gateway of a lab.
    """
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
    """Return the program of an embedded service.

    Args:
        cloud: The cloud.
        name: The name of the process.
        module: The module below deploy.one_machine.services.
        arguments: The arguments of the module's command ``serve``.
        network: The file of the network namespace, or None for the machine's own.
    """
    words = ["serve", *map(str, arguments)]
    full_name = f"deploy.one_machine.services.{module}"
    return _program(
        cloud,
        name,
        [*([NSENTER, f"--net={network}"] if network else []), PYTHON, "-m", full_name, *words],
        entry=Entry(f"{full_name}.__main__", words, network=str(network) if network else None),
    )


def _program(
    cloud: Cloud,
    name: str,
    command: list[str],
    host: str | None = None,
    role: str = "",
    entry: Entry | None = None,
) -> Program:
    environment = make_environment(cloud, host, role)
    return Program(name, command, str(cloud.log(name)), str(ROOT), environment, entry=entry)
