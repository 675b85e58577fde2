# SPDX-License-Identifier: Apache-2.0
"""Services behind a proxy that terminates TLS: links contain the address of the proxy.

Forwarded headers are accepted only if the operator enables the option.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg

from compute_api.http.worker import forwarded
from deploy.one_machine.cloud.probes import answers
from deploy.testing.servers import free_ports
from tests.api.conftest import IMAGE, Cloud
from tests.waiting import await_true

PROXY = {
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "cloud.example",
    "X-Forwarded-For": "192.0.2.7",
    "X-Forwarded-Prefix": "/compute",
}
#: An application behind the server that every service uses.
APPLICATION = """
import json, sys
from common.service import config
from compute_api.http.worker.server import Server
config.load(sys.argv[2])
SEEN = ("wsgi.url_scheme", "HTTP_HOST", "SCRIPT_NAME", "PATH_INFO", "REMOTE_ADDR")
def application(environ, start_response):
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps([environ[name] for name in SEEN]).encode()]
Server("test", "127.0.0.1", int(sys.argv[1]), lambda: application, lambda: None, threads=2).run()
"""


@contextmanager
def run_application(folder: Path, *lines: str) -> Iterator[int]:
    port, path = free_ports(1), folder / "kilonova.conf"
    path.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([sys.executable, "-c", APPLICATION, str(port), str(path)])
    await_true(lambda: answers(port), 30, "it listens")
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def request_environ(port: int) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"http://127.0.0.1:{port}/a", headers=PROXY)
    return json.load(opener.open(request, timeout=30))


def test_proxy_headers_are_ignored_by_default(tmp_path: Path) -> None:
    """By itself the HTTP server gunicorn accepts such headers from this machine."""
    with run_application(tmp_path) as port:
        assert request_environ(port) == ["http", f"127.0.0.1:{port}", "", "/a", "127.0.0.1"]


def test_proxy_headers_are_accepted_when_option_is_on(tmp_path: Path) -> None:
    with run_application(
        tmp_path, "[oslo_middleware]", "enable_proxy_headers_parsing = true"
    ) as port:
        assert request_environ(port) == ["https", "cloud.example", "/compute", "/a", "192.0.2.7"]


@pytest.fixture
def proxied_cloud(cloud: Cloud) -> Cloud:
    """Return the API behind a proxy with accepted headers."""
    conf = cfg.ConfigOpts()
    conf.register_opts([cfg.BoolOpt("enable_proxy_headers_parsing")], group="oslo_middleware")
    conf([], default_config_files=[], default_config_dirs=[])
    conf.set_override("enable_proxy_headers_parsing", True, group="oslo_middleware")
    cloud.client.app = forwarded.apply_proxy_headers(cloud.client.app, conf)
    return cloud


def test_links_contain_address_of_proxy(proxied_cloud: Cloud) -> None:
    answer = proxied_cloud.call("GET", "/", root="", token=None, headers=PROXY)
    assert [version["links"][0]["href"] for version in answer.json["versions"]] == [
        "https://cloud.example/compute/v2/",
        "https://cloud.example/compute/v2.1/",
    ]
    body = {"server": {"name": "a", "imageRef": IMAGE, "flavorRef": "1"}}
    answer_to_create = proxied_cloud.call("POST", "/servers", body, headers=PROXY)
    assert answer_to_create.status_code == 202, answer_to_create.text
    server = answer_to_create.json["server"]["id"]
    expected_url = f"https://cloud.example/compute/v2.1/servers/{server}"
    assert (
        answer_to_create.headers["Location"]
        == answer_to_create.json["server"]["links"][0]["href"]
        == expected_url
    )
