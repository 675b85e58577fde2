# SPDX-License-Identifier: Apache-2.0
"""Keystone's unified limits, read by oslo.limit from a real identity service.

The tests run with and without options in [oslo_limit].
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openstack
import pytest
import requests
from keystoneauth1 import loading
from oslo_limit import limit

from common.clients import limits
from common.clients.limits import UnifiedLimits
from common.domain import errors
from common.domain.errors import ConfigError
from common.service import config
from common.store.engine import Store
from deploy.testing.servers import free_ports
from tests.log_lines import rendered_lines
from tests.schemas import upgrade
from tests.standalone import Cloud

DEFAULTED = ("auth_type", "timeout", "endpoint_service_type", "endpoint_region_name")


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


@pytest.fixture(scope="module")
def identity(cloud: Cloud) -> Any:
    """Return the admin's client, with limits of the service "compute" in two regions.

    One is the cloud's region.
    """
    client = openstack.connect(
        load_yaml_config=False,
        load_envvars=False,
        region_name="RegionOne",
        auth={
            "auth_url": cloud.auth_url,
            "username": "admin",
            "password": cloud.admin_password,
            "project_name": "admin",
            "user_domain_id": "default",
            "project_domain_id": "default",
        },
    ).identity
    service = client.create_service(name="kilonova", type="compute")
    client.create_region(id="Elsewhere")
    for interface in ("public", "internal"):
        client.create_endpoint(
            service_id=service.id, interface=interface, region_id="RegionOne", url="http://compute"
        )
    for region, number in (("RegionOne", 10), ("Elsewhere", 99)):
        for name in ("servers", "class:VCPU"):
            client.create_registered_limit(
                service_id=service.id, region_id=region, resource_name=name, default_limit=number
            )
    for region, number in (("RegionOne", 3), ("Elsewhere", 98)):
        client.create_limit(
            service_id=service.id,
            region_id=region,
            resource_name="servers",
            resource_limit=number,
            project_id=client.find_project("service").id,
        )
    return client


def write_config(cloud: Cloud, folder: Path, *lines: str) -> Path:
    """Write a configuration file with these lines in [oslo_limit]."""
    path = folder / "kilonova.conf"
    path.write_text(
        "\n".join(
            [
                "[quota]",
                "driver = unified",
                "unified_limits_cache_seconds = 0",
                "[database]",
                f"url = sqlite:///{folder}/k.db",
                "[identity]",
                f"auth_url = {cloud.auth_url}",
                f"password = {cloud.service_password}",
                "[oslo_limit]",
                *lines,
            ]
        )
        + "\n"
    )
    return path


@pytest.fixture
def client(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., UnifiedLimits]]:
    """Yield a function that returns the limits' client for lines of [oslo_limit].

    Login and options of oslo.limit, which belong to the whole process, are reset.
    """
    clients: list[UnifiedLimits] = []
    monkeypatch.setattr(limit, "_SDK_CONNECTION", None)

    def create_client(*lines: str) -> UnifiedLimits:
        unified_limits = limits.configured(config.load(str(write_config(cloud, tmp_path, *lines))))
        assert unified_limits is not None
        clients.append(unified_limits)
        return unified_limits

    yield create_client
    for created_client in clients:
        created_client.close()
    config.CONF.clear()
    for name in DEFAULTED:
        config.CONF.clear_default(name, group="oslo_limit")
    config.CONF.unregister_opts(
        loading.get_auth_plugin_conf_options("password"), group="oslo_limit"
    )


def test_unified_limits_are_read_per_project_and_region(
    client: Callable[..., UnifiedLimits], identity: Any
) -> None:
    reader, project = client(), identity.find_project("service").id
    assert reader.of("*") == {"servers": 10, "class:VCPU": 10}
    assert reader.of(project) == {"servers": 3, "class:VCPU": 10}
    assert reader.of("another") == {"servers": 10, "class:VCPU": 10}
    [project_limit] = [
        row for row in identity.limits(project_id=project) if row.region_id == "RegionOne"
    ]
    identity.update_limit(project_limit, resource_limit=4)
    assert reader.of(project)["servers"] == 4
    identity.update_limit(project_limit, resource_limit=3)


def test_unified_limits_use_login_and_endpoint_of_oslo_limit(
    client: Callable[..., UnifiedLimits], identity: Any, cloud: Cloud
) -> None:
    [endpoint] = identity.endpoints(
        service_id=identity.find_service("kilonova").id, interface="public"
    )
    reader = client(
        "auth_type = password",
        f"auth_url = {cloud.auth_url}",
        "username = admin",
        f"password = {cloud.admin_password}",
        "user_domain_id = default",
        "system_scope = all",
        f"endpoint_id = {endpoint.id}",
    )
    assert reader.of(identity.find_project("service").id) == {"servers": 3, "class:VCPU": 10}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("project_name = admin", "project_domain_id = default"), "has no system_scope = all"),
        (("system_scope = all", "endpoint_id = none"), "Can't find endpoint for none"),
        (("system_scope = all", "endpoint_service_type = none"), "Service not found"),
    ],
)
def test_unified_limits_with_wrong_options_are_unavailable_and_logged(
    client: Callable[..., UnifiedLimits],
    identity: Any,
    cloud: Cloud,
    lines: tuple[str, ...],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = client(
        "auth_type = password",
        f"auth_url = {cloud.auth_url}",
        "username = admin",
        f"password = {cloud.admin_password}",
        "user_domain_id = default",
        *lines,
    )
    with pytest.raises(errors.Unavailable, match="does not return the limits"):
        reader.of("*")
    text = "\n".join(rendered_lines(caplog))
    assert message in text and cloud.admin_password not in text


def test_unified_limits_from_remote_identity_over_plain_http_are_refused(
    client: Callable[..., UnifiedLimits],
) -> None:
    lines = ("auth_type = password", "username = u", "password = p", "system_scope = all")
    with pytest.raises(
        ConfigError, match=r"\[oslo_limit\] auth_url: http://10.0.0.5:5000 is no https://"
    ):
        client(*lines, "auth_url = http://10.0.0.5:5000/v3")
    with pytest.raises(
        ConfigError, match=r"\[oslo_limit\] endpoint_override: http://10.0.0.5 is no https://"
    ):
        client(*lines, "auth_url = https://i/v3", "endpoint_override = http://10.0.0.5/")


def test_unified_limits_are_unavailable_when_identity_does_not_answer(
    client: Callable[..., UnifiedLimits], identity: Any
) -> None:
    reader = client(
        "auth_type = password",
        "auth_url = http://127.0.0.1:9/v3",
        "username = admin",
        "password = x",
        "user_domain_id = default",
        "system_scope = all",
    )
    with pytest.raises(errors.Unavailable, match="does not return the limits"):
        reader.of("*")


@pytest.fixture
def api(cloud: Cloud, identity: Any, tmp_path: Path) -> Iterator[str]:
    """Yield the API process with these limits."""
    port = free_ports(1)
    upgrade(Store(f"sqlite:///{tmp_path}/k.db")).close()
    path = write_config(cloud, tmp_path)
    path.write_text(path.read_text() + f"[api]\nport = {port}\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(tmp_path / "notify"))
        notices.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-m", "compute_api.compute.service"],
            env={
                **os.environ,
                "KILONOVA_CONF": str(path),
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
            },
        )
        assert b"READY=1" in notices.recv(1000)
    yield f"http://127.0.0.1:{port}/v2.1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_create_server_group_returns_403_at_keystone_limit_until_raised(
    api: str, identity: Any
) -> None:
    """A project at the limit is refused until an admin raises the limit in Keystone."""
    registered_limit = identity.create_registered_limit(
        service_id=identity.find_service("kilonova").id,
        region_id="RegionOne",
        default_limit=0,
        resource_name="server_groups",
    )
    headers = {"X-Auth-Token": identity.session.get_token()}

    def create_group() -> int:
        body = {"server_group": {"name": "g", "policies": ["affinity"]}}
        return requests.post(
            f"{api}/os-server-groups", json=body, headers=headers, timeout=30
        ).status_code

    assert create_group() == 403
    identity.update_registered_limit(registered_limit, default_limit=1)
    assert [create_group(), create_group()] == [200, 403]
    absolute = requests.get(f"{api}/limits", headers=headers, timeout=30).json()["limits"][
        "absolute"
    ]
    assert (absolute["maxServerGroups"], absolute["totalServerGroupsUsed"]) == (1, 1)
    assert (absolute["maxTotalInstances"], absolute["maxTotalRAMSize"]) == (10, -1)
    identity.delete_registered_limit(registered_limit)
