# SPDX-License-Identifier: Apache-2.0
"""Cinder's API, scheduler and volume service as processes, with the driver of Cinder's own tests:
volumes are rows, and every connection is granted."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deploy import environment
from deploy.servers import http_answers
from tests.standalone import Cloud
from tests.waiting import await_true

START_SECONDS = 120
SERVICES = ("cinder-api", "cinder-scheduler", "cinder-volume")
DRIVER = "cinder.tests.fake_driver.FakeLoggingVolumeDriver"
HOST = "cinder-host"


@contextmanager
def running_cinder(
    folder: Path, cloud: Cloud, port: int, broker_url: str, database_url: str
) -> Iterator[str]:
    """The URL of a Cinder that serves this cloud until the end of the block.

    Raises RuntimeError with the end of a log when a service does not come up.
    """
    conf = _configure(folder, cloud, port, broker_url, database_url)
    subprocess.run(
        [environment.CINDER / "bin/cinder-manage", "--config-file", conf, "db", "sync"],
        stdout=(folder / "upgrade.log").open("wb"),
        stderr=subprocess.STDOUT,
        check=True,
        timeout=START_SECONDS,
    )
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        for name in SERVICES:
            stack.enter_context(_service(name, conf, folder / f"{name}.log"))
        await_true(lambda: http_answers(f"{url}/"), START_SECONDS, "Cinder's API answers")
        yield f"{url}/v3"


def _configure(folder: Path, cloud: Cloud, port: int, broker_url: str, database_url: str) -> Path:
    for name in ("state", "locks"):
        (folder / name).mkdir(parents=True)
    shipped = environment.CINDER / "etc/cinder"
    parser = ConfigParser(interpolation=None)
    parser.read_dict(
        {
            "DEFAULT": {
                "transport_url": broker_url,
                "auth_strategy": "keystone",
                "state_path": folder / "state",
                "osapi_volume_listen": "127.0.0.1",
                "osapi_volume_listen_port": port,
                "osapi_volume_workers": 1,
                "enabled_backends": "memory",
                "glance_api_servers": cloud.image_url,
                "host": HOST,
                "api_paste_config": shipped / "api-paste.ini",
                "resource_query_filters_file": shipped / "resource_filters.json",
                "rootwrap_config": shipped / "rootwrap.conf",
            },
            "memory": {
                "volume_driver": DRIVER,
                "volume_backend_name": "memory",
                "target_helper": "fake",
            },
            "database": {"connection": database_url},
            "oslo_concurrency": {"lock_path": folder / "locks"},
            "coordination": {"backend_url": f"file://{folder}/state"},
            "keystone_authtoken": {
                "auth_type": "password",
                "auth_url": cloud.auth_url,
                "www_authenticate_uri": cloud.auth_url,
                "username": "kilonova",
                "password": cloud.service_password,
                "project_name": "service",
                "user_domain_id": "default",
                "project_domain_id": "default",
            },
        }
    )
    path = folder / "cinder.conf"
    with path.open("w") as file:
        parser.write(file)
    return path


@contextmanager
def _service(name: str, conf: Path, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            [environment.CINDER / "bin" / name, "--config-file", conf],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
