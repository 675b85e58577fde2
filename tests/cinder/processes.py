# SPDX-License-Identifier: Apache-2.0
"""Cinder's API, scheduler and volume service as processes, with the driver of Cinder's tests.

The driver stores volumes only as rows, and accepts every connection.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from deploy import environment
from deploy.one_machine.cloud.probes import http_answers
from tests.standalone import Cloud
from tests.waiting import await_true

START_SECONDS = 120
#: Seconds that Cinder's API waits for its volume service.
ANSWER_SECONDS = 4
SERVICES = ("cinder-api", "cinder-scheduler", "cinder-volume")
DRIVER = "cinder.tests.fake_driver.FakeLoggingVolumeDriver"
#: A key manager with the same key for every encrypted volume.
KEY_MANAGER = "cinder.keymgr.conf_key_mgr.ConfKeyManager"
#: Two backends, each with a capability that a volume type can require.
HOST, BACKENDS, CAPABILITY = "cinder-host", ("memory", "other"), "shelf"


class Process:
    """A process of Cinder, which a test can stop and continue, or kill and start again."""

    def __init__(self, name: str, conf: Path, log: Path) -> None:
        self._command = [environment.CINDER / "bin" / name, "--config-file", conf]
        self._log = log
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def silence(self) -> None:
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def restore(self) -> None:
        """Continue the stopped process, or start the killed process again."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
        else:
            self._process = self._start()

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def run_cinder(
    folder: Path, cloud: Cloud, port: int, broker_url: str, database_url: str
) -> Iterator[dict[str, Process]]:
    """Run the services of a Cinder for ``cloud``, with the API at ``port``, for a with block."""
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
        services: dict[str, Process] = {}
        for name in SERVICES:
            services[name] = Process(name, conf, folder / f"{name}.log")
            stack.callback(services[name].end)
        await_true(lambda: http_answers(f"{url}/"), START_SECONDS, "Cinder's API answers")
        yield services


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
                "enabled_backends": ",".join(BACKENDS),
                "glance_api_servers": cloud.image_url,
                "host": HOST,
                "rpc_response_timeout": ANSWER_SECONDS,
                "quota_volumes": -1,
                "api_paste_config": shipped / "api-paste.ini",
                "resource_query_filters_file": shipped / "resource_filters.json",
                "rootwrap_config": shipped / "rootwrap.conf",
            },
            **{
                name: {
                    "volume_driver": DRIVER,
                    "volume_backend_name": name,
                    "target_helper": "fake",
                    "extra_capabilities": json.dumps({CAPABILITY: name}),
                }
                for name in BACKENDS
            },
            "database": {"connection": database_url},
            "oslo_concurrency": {"lock_path": folder / "locks"},
            "coordination": {"backend_url": f"file://{folder}/state"},
            "nova": _make_service_options(cloud),
            "key_manager": {"backend": KEY_MANAGER, "fixed_key": secrets.token_hex(32)},
            "keystone_authtoken": _make_service_options(cloud)
            | {"www_authenticate_uri": cloud.auth_url},
        }
    )
    path = folder / "cinder.conf"
    with path.open("w") as file:
        parser.write(file)
    return path


def _make_service_options(cloud: Cloud) -> dict[str, str]:
    """Return the options with which Cinder authenticates to the identity service."""
    return {
        "auth_type": "password",
        "auth_url": cloud.auth_url,
        "username": "kilonova",
        "password": cloud.service_password,
        "project_name": "service",
        "user_domain_id": "default",
        "project_domain_id": "default",
    }
