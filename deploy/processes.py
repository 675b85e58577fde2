# SPDX-License-Identifier: Apache-2.0
"""The processes of one cloud, in the order of their start: what each is called, its command and its log.

Used by deploy/cloud.py. A host has an agent, with the driver libvirt a libvirtd of its own, and when the cloud has
networks a host part of the network service; those of a further host end in its number: "agent-2". No secret stands
in a command or in an environment.
"""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.broker import USER as BROKER_USER
from deploy.environment import VENV
from deploy.packages import ROOT
from deploy.supervise import Program
from deploy.underlay import NAMESPACES

if TYPE_CHECKING:
    from deploy.cloud import Cloud

PYTHON = str(VENV / "bin/python")
#: What runs before the others, which would find nothing and wait.
NEIGHBOURS = ("epmd", "rabbitmq", "libvirtd")
#: Once in a cloud; each is a program of our own.
SERVICES = ("api", "conductor", "scheduler", "placement")


def programs(cloud: Cloud) -> list[Program]:
    """All of them."""
    return [*_neighbours(cloud), *_standalone(cloud), *_own(cloud)]


def _neighbours(cloud: Cloud) -> Iterator[Program]:
    broker = cloud.broker if cloud.broker_url is None else None
    if broker is not None:
        for name, command in (("epmd", broker.mapper_command()), ("rabbitmq", broker.command())):
            yield Program(name, command, str(cloud.log(name)), str(broker.folder), broker.environment, BROKER_USER)
    if cloud.driver == "libvirt":
        for number, host in enumerate(cloud.hosts, 1):
            network = _namespace(cloud, number)
            yield _program(cloud, numbered("libvirtd", number), [
                sys.executable, str(ROOT / "deploy/libvirtd.py"), "serve", str(cloud.libvirt_folder(number)),
                *([str(network), host] if network else [])])


def _standalone(cloud: Cloud) -> Iterator[Program]:
    ports, asking = cloud.ports, ["--auth-url", cloud.identity_url, "--password-file", str(cloud.secret("kilonova"))]
    yield _module(cloud, "identity", "identity", "--bind", f"127.0.0.1:{ports.identity}", "--db", cloud.identity_db)
    yield _module(cloud, "image", "image", "--bind", f"127.0.0.1:{ports.image}", "--data", cloud.home / "image",
                  *asking)
    if not cloud.has_networks:
        return
    hosts = cloud.driver == "libvirt"
    yield _module(cloud, "network", "network", "--bind", f"127.0.0.1:{ports.network}", "--db",
                  cloud.home / "data/network.db", "--vni-base", cloud.underlay.first_identifier, *asking,
                  *([] if hosts else ["--no-hosts"]))
    for number, host in enumerate(cloud.hosts, 1) if hosts else ():
        yield _module(cloud, numbered("network-host", number), "network.host", "--host", host, *_place(cloud, number),
                      "--url", cloud.network_url, *asking, "--tunnel-address", cloud.underlay.address(number),
                      "--vxlan-port", ports.network, *(["--external-gateway"] if number == 1 else []),
                      "--metadata-url", cloud.metadata_url, "--metadata-secret-file", cloud.secret("metadata"))


def _own(cloud: Cloud) -> Iterator[Program]:
    edge = {"metadata": cloud.has_networks, "console": cloud.driver == "libvirt"}
    for name in (*SERVICES, *(name for name, wanted in edge.items() if wanted)):
        yield _program(cloud, name, [str(VENV / f"bin/kilonova-{name}")])
    for number, host in enumerate(cloud.hosts, 1):
        yield _program(cloud, numbered("agent", number), [str(VENV / "bin/kilonova-agent")], host)


def cleaning(cloud: Cloud, number: int) -> list[str]:
    """The command that removes all that a host's part of the network service ever made."""
    return [PYTHON, "-m", "deploy.standalone.network.host", "clean", *_place(cloud, number)]


def _place(cloud: Cloud, number: int) -> list[str]:
    """Where a host's part of the network service keeps its state, and in which network namespace it works."""
    network = _namespace(cloud, number)
    return ["--state", str(cloud.network_folder(number)), *(["--netns", str(network)] if network else [])]


def _namespace(cloud: Cloud, number: int) -> Path | None:
    """Of the host's own network namespace; None for a host in the machine's."""
    name = cloud.underlay.namespace(number) if cloud.has_networks and cloud.driver == "libvirt" else None
    return NAMESPACES / name if name else None


def numbered(name: str, number: int) -> str:
    """ "agent" of the first host, "agent-2" of the second."""
    return name if number == 1 else f"{name}-{number}"


def _module(cloud: Cloud, name: str, module: str, *arguments: object) -> Program:
    """One of the standalone services."""
    return _program(cloud, name, [PYTHON, "-m", f"deploy.standalone.{module}", "serve", *map(str, arguments)])


def _program(cloud: Cloud, name: str, command: list[str], host: str | None = None) -> Program:
    return Program(name, command, str(cloud.log(name)), str(ROOT), cloud.environment(host))
