# SPDX-License-Identifier: Apache-2.0
"""One Cinder for all tests of the ring, with our identity and image service beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from deploy.testing.servers import free_ports
from tests.cinder.processes import Process, running_cinder
from tests.schemas import Server
from tests.standalone import Cloud, running


@dataclass(frozen=True)
class RunningCinder:
    """Its URL, the cloud that it is in, the process that serves the volumes, and the port at which
    it finds the compute service."""

    url: str
    cloud: Cloud
    volume: Process
    compute_port: int


@pytest.fixture(scope="session")
def cinder(
    tmp_path_factory: pytest.TempPathFactory,
    rabbitmq_url: str,
    servers: Callable[[str], Server],
) -> Iterator[RunningCinder]:
    folder, (port, compute_port) = tmp_path_factory.mktemp("cinder"), (free_ports(1), free_ports(1))
    database = servers("mariadb").create()
    plain = sa.make_url(database).set(drivername="mysql+pymysql")
    with running(tmp_path_factory.mktemp("cloud"), with_image=True) as cloud:
        cloud.bootstrap(
            **{
                "block-storage": f"http://127.0.0.1:{port}/v3",
                "compute": f"http://127.0.0.1:{compute_port}/v2.1",
            }
        )
        with running_cinder(
            folder, cloud, port, rabbitmq_url, plain.render_as_string(hide_password=False)
        ) as services:
            yield RunningCinder(
                f"http://127.0.0.1:{port}/v3", cloud, services["cinder-volume"], compute_port
            )
    servers("mariadb").drop(database)
