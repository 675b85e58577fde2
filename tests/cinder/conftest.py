# SPDX-License-Identifier: Apache-2.0
"""A Cinder for all tests of the ring, beside the embedded identity and image services."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from deploy.testing.servers import free_ports
from tests.cinder.processes import Process, run_cinder
from tests.schemas import Server
from tests.standalone import Cloud, running


@dataclass(frozen=True)
class RunningCinder:
    """A running Cinder.

    Attributes:
        cloud: The embedded services that Cinder uses.
        volume: The process cinder-volume.
        compute_port: The port at which Cinder reaches the compute API.
    """

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
        with run_cinder(
            folder, cloud, port, rabbitmq_url, plain.render_as_string(hide_password=False)
        ) as services:
            yield RunningCinder(
                f"http://127.0.0.1:{port}/v3", cloud, services["cinder-volume"], compute_port
            )
    servers("mariadb").drop(database)
