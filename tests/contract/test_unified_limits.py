# SPDX-License-Identifier: Apache-2.0
"""Keystone's limits as oslo.limit reads them from a real identity service, with [oslo_limit] and
without."""

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
from tests.schemas import upgrade
from tests.standalone import Cloud

DEFAULTED = ("auth_type", "timeout", "endpoint_service_type", "endpoint_region_name")


@pytest.fixture(scope="module")
def cloud(standalone_cloud: Cloud) -> Cloud:
    return standalone_cloud


@pytest.fixture(scope="module")
def identity(cloud: Cloud) -> Any:
    """Its admin's client, and limits of a service "compute" in the region of the cloud, and in
    another one."""
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


def written(cloud: Cloud, folder: Path, *lines: str) -> Path:
    """A configuration file with these lines in [oslo_limit]."""
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
    """Reads what it is given as [oslo_limit]; oslo.limit keeps its login and options for the whole
    process."""
    made: list[UnifiedLimits] = []
    monkeypatch.setattr(limit, "_SDK_CONNECTION", None)

    def make(*lines: str) -> UnifiedLimits:
        found = limits.configured(config.load(str(written(cloud, tmp_path, *lines))))
        assert found is not None
        made.append(found)
        return found

    yield make
    for one in made:
        one.close()
    config.CONF.clear()
    for name in DEFAULTED:
        config.CONF.clear_default(name, group="oslo_limit")
    config.CONF.unregister_opts(
        loading.get_auth_plugin_conf_options("password"), group="oslo_limit"
    )


def test_limits_are_read_as_identity_says(
    client: Callable[..., UnifiedLimits], identity: Any
) -> None:
    reader, project = client(), identity.find_project("service").id
    assert reader.of("*") == {"servers": 10, "class:VCPU": 10}
    assert reader.of(project) == {"servers": 3, "class:VCPU": 10}
    assert reader.of("another") == {"servers": 10, "class:VCPU": 10}
    [own] = [one for one in identity.limits(project_id=project) if one.region_id == "RegionOne"]
    identity.update_limit(own, resource_limit=4)
    assert reader.of(project)["servers"] == 4
    identity.update_limit(own, resource_limit=3)


def test_limits_are_read_as_oslo_limit_says(
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
    ("more", "says"),
    [
        (("project_name = admin", "project_domain_id = default"), "has no system_scope = all"),
        (("system_scope = all", "endpoint_id = none"), "Can't find endpoint for none"),
        (("system_scope = all", "endpoint_service_type = none"), "Service not found"),
    ],
)
def test_wrong_options_give_no_limits_and_say_why(
    client: Callable[..., UnifiedLimits],
    identity: Any,
    cloud: Cloud,
    more: tuple[str, ...],
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = client(
        "auth_type = password",
        f"auth_url = {cloud.auth_url}",
        "username = admin",
        f"password = {cloud.admin_password}",
        "user_domain_id = default",
        *more,
    )
    with pytest.raises(errors.Unavailable, match="does not tell the limits"):
        reader.of("*")
    assert says in caplog.text
    assert cloud.admin_password not in caplog.text


def test_no_limits_are_asked_for_as_plain_text_elsewhere(
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


def test_a_silent_identity_service_gives_no_limits(
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
    with pytest.raises(errors.Unavailable, match="does not tell the limits"):
        reader.of("*")


@pytest.fixture
def api(cloud: Cloud, identity: Any, tmp_path: Path) -> Iterator[str]:
    """The process, under these limits."""
    port = free_ports(1)
    upgrade(Store(f"sqlite:///{tmp_path}/k.db")).close()
    path = written(cloud, tmp_path)
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


def test_the_api_holds_what_keystone_limits(api: str, identity: Any) -> None:
    """Whoever reaches a limit is refused until it is raised there."""
    made = identity.create_registered_limit(
        service_id=identity.find_service("kilonova").id,
        region_id="RegionOne",
        default_limit=0,
        resource_name="server_groups",
    )
    headers = {"X-Auth-Token": identity.session.get_token()}

    def create() -> int:
        body = {"server_group": {"name": "g", "policies": ["affinity"]}}
        return requests.post(
            f"{api}/os-server-groups", json=body, headers=headers, timeout=30
        ).status_code

    assert create() == 403
    identity.update_registered_limit(made, default_limit=1)
    assert [create(), create()] == [200, 403]
    absolute = requests.get(f"{api}/limits", headers=headers, timeout=30).json()["limits"][
        "absolute"
    ]
    assert (absolute["maxServerGroups"], absolute["totalServerGroupsUsed"]) == (1, 1)
    assert (absolute["maxTotalInstances"], absolute["maxTotalRAMSize"]) == (10, -1)
    identity.delete_registered_limit(made)
