# SPDX-License-Identifier: Apache-2.0
"""The checks of ``up``, ``down`` and ``test`` before they change the machine.

The tests include the messages of failed steps, and the files that ``up`` prepares.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from string import hexdigits

import pytest

from common.security.tls import check_external_url
from common.service import config
from deploy import packages
from deploy.one_machine import down, preflight, up
from deploy.one_machine.cloud import lifecycle, processes
from deploy.one_machine.cloud.cloud import Cloud, Ports
from deploy.one_machine.cloud.configuration import ROLES
from deploy.one_machine.cloud.probes import is_taken
from deploy.progress import Failure, main, run, steps, wait
from deploy.testing import test
from deploy.testing.servers import EVERYWHERE, STEP, free_ports


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path / "home", Ports.from_base(free_ports(Ports.COUNT)))


def test_preflight_refuses_taken_port_and_names_its_service(cloud: Cloud) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", cloud.ports.image))
        other.listen()
        with pytest.raises(Failure, match=rf"needs: {cloud.ports.image} \(image\)") as caught:
            preflight.check_ports(cloud)
    assert "KILONOVA_PORT_BASE" in caught.value.todo
    preflight.check_ports(cloud)


def test_preflight_refuses_home_path_too_long_for_sockets(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="sockets in this folder allow"):
        preflight.check_home(Cloud(tmp_path / ("x" * 60)))


def test_preflight_refuses_home_below_private_folder() -> None:
    with tempfile.TemporaryDirectory(prefix="kn-", dir="/tmp") as private:
        cloud = Cloud(Path(private) / "home")
        with pytest.raises(Failure, match=f"cannot enter {private} on the way to {private}/home"):
            preflight.check_home(cloud)
        preflight.check_home(replace(cloud, broker_url="rabbit://u:p@broker/", driver="memory"))
        Path(private).chmod(0o711)
        preflight.check_home(cloud)


def test_preflight_requires_root() -> None:
    with pytest.raises(Failure, match="must run as root"):
        preflight.check_machine(1000)


def test_preflight_checks_create_no_files(cloud: Cloud) -> None:
    home = Path(f"/tmp/kn-looking-{os.getpid()}")
    preflight.check_space(replace(cloud, home=home))
    preflight.check_ports(cloud)
    preflight.find_neighbours(cloud)
    assert not home.exists() and not cloud.home.exists()


def test_failing_step_prints_its_number_failure_and_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raise_failure() -> str:
        raise Failure("The disk is full.", "Make room.")

    def work() -> int:
        steps([("Fine", lambda: "a note"), ("Disk", raise_failure)], first=3, total=9)
        return 0

    assert main(work) == 1
    captured = capsys.readouterr()
    assert captured.out == "[3/9] Fine …\n        a note\n[4/9] Disk …\n"
    assert "Step 4 (Disk) failed: The disk is full.\nWhat to do: Make room." in captured.err


def test_run_of_failing_program_shows_end_of_output_and_log_path(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="ended with 2") as caught:
        run(["ls", "/nonexistent/folder"], "Look.", log=tmp_path / "log")
    assert "  | ls: " in caught.value.what and str(tmp_path / "log") in caught.value.todo
    assert "/nonexistent/folder" in (tmp_path / "log").read_text()
    with pytest.raises(Failure, match="The program .* is not installed"):
        run(["/nonexistent/program"], "Install it.")


def test_wait_timeout_fails_with_advice_computed_at_timeout() -> None:
    with pytest.raises(Failure, match="It is late") as caught:
        wait(lambda: False, 0.01, "It is late", lambda: "advice", pause=0.001)
    assert caught.value.todo == "advice"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(up.command, ["now"]), (down.command, ["--all"]), (test.run, ["nonsense"])],
)
def test_up_down_and_test_refuse_unknown_arguments_with_advice(
    command: Callable[[list[str]], int], arguments: list[str]
) -> None:
    with pytest.raises(Failure) as caught:
        command(arguments)
    assert arguments[0] in caught.value.what and caught.value.todo


def test_image_packages_come_from_build_script_and_missing_are_listed() -> None:
    assert "busybox-static" in packages.image_packages()
    assert packages.missing(["no-such-package-in-debian"]) == ["no-such-package-in-debian"]
    assert packages.missing(["dpkg"]) == []


def test_preflight_refuses_loopback_broker_for_hosts_in_namespaces(tmp_path: Path) -> None:
    url = "rabbit://guest:guest@127.0.0.1:1/"
    with pytest.raises(
        Failure, match="cannot reach the broker of KILONOVA_TRANSPORT_URL"
    ) as caught:
        preflight.check_broker(Cloud(tmp_path, hosts=("h1", "h2"), broker_url=url))
    assert "KILONOVA_TRANSPORT_URL" in caught.value.todo
    for allowed_cloud in (
        Cloud(tmp_path, hosts=("h1",), broker_url=url),
        Cloud(tmp_path, hosts=("h1", "h2")),
        Cloud(tmp_path, hosts=("h1", "h2"), broker_url=url, networks=False),
    ):
        preflight.check_broker(allowed_cloud)


def test_free_ports_are_distinct_and_is_taken_checks_every_address() -> None:
    ports = [free_ports(1) for _ in range(100)]
    assert len(set(ports)) == 100 and all(port % STEP == 0 for port in ports)
    with socket.create_server(("127.0.0.77", ports[0])):
        assert [
            is_taken(ports[0], address) for address in (EVERYWHERE, "127.0.0.77", "127.0.0.1")
        ] == [True, True, False]
    assert not is_taken(ports[0], EVERYWHERE)
    assert not is_taken(ports[0], "192.0.2.1"), "an address that is nobody's here"


def test_free_ports_gives_each_port_to_one_process() -> None:
    own_ports = {free_ports(1) for _ in range(50)}
    script = (
        "from deploy.testing.servers import free_ports\nfor _ in range(200): print(free_ports(1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=packages.ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    other_ports = {int(port) for port in done.stdout.split()}
    assert len(other_ports) == 200 and own_ports.isdisjoint(other_ports)


def test_prepare_keeps_dollar_in_urls_of_operator(tmp_path: Path) -> None:
    url = "mysql+pymysql://u:p$word$$x${host}@127.0.0.1:1/kilonova"
    cloud = Cloud(
        tmp_path,
        hosts=("h1",),
        driver="memory",
        broker_url="rabbit://a:b$c@127.0.0.1:1/",
        database_url=url,
    )
    lifecycle.prepare(cloud)
    assert config.load(str(cloud.config())).database.url == url
    assert "transport_url = rabbit://a:b$$c@127.0.0.1:1/" in cloud.config().read_text()


def test_prepare_writes_further_options_beside_generated_options(tmp_path: Path) -> None:
    cloud = Cloud(
        tmp_path,
        hosts=("h1",),
        driver="memory",
        options=(("DEFAULT", "shelved_offload_time", -1), ("quota", "driver", "unified")),
    )
    lifecycle.prepare(cloud)
    conf = config.load(str(cloud.config()))
    assert (conf.shelved_offload_time, conf.quota.driver, conf.host) == (-1, "unified", "h1")


@pytest.mark.parametrize(("hosts", "driver"), [(("h1",), "memory"), (("h1", "h2"), "libvirt")])
def test_prepare_lets_own_processes_use_embedded_services_over_http(
    tmp_path: Path, hosts: tuple[str, ...], driver: str
) -> None:
    """The embedded services use HTTP, and in a lab their address is not loopback."""
    cloud = Cloud(
        tmp_path, hosts=hosts, driver=driver, broker_url="rabbit://guest:guest@127.0.0.1:1/"
    )
    lifecycle.prepare(cloud)
    for role in ("", *ROLES):
        check_external_url(
            config.load(str(cloud.config(role=role))), "[identity] auth_url", cloud.identity_url
        )
        assert config.CONF.identity.allow_plain_text == cloud.is_joined


@pytest.mark.parametrize("role", ROLES)
def test_prepare_keeps_command_and_ticket_secrets_out_of_role_files(
    tmp_path: Path, role: str
) -> None:
    cloud = Cloud(
        tmp_path, hosts=("h1",), driver="memory", broker_url="rabbit://guest:guest@127.0.0.1:1/"
    )
    lifecycle.prepare(cloud)
    own, others = cloud.config().read_text(), cloud.config(role=role).read_text()
    for name in ("commands", "tickets"):
        assert cloud.password(name) in own and cloud.password(name) not in others
    assert cloud.password("queries") in others


def test_prepare_writes_files_for_owner_only_and_repeated_keeps_secrets(tmp_path: Path) -> None:
    cloud = Cloud(
        tmp_path,
        hosts=("h1", "h2"),
        driver="memory",
        broker_url="rabbit://guest:guest@127.0.0.1:1/",
    )
    lifecycle.prepare(cloud)
    configs = [cloud.config(), cloud.config("h1"), cloud.config("h2")]
    files = [*configs, cloud.clouds_yaml, *(tmp_path / "secrets").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert all(set(path.read_text()) <= set(hexdigits) for path in (tmp_path / "secrets").iterdir())
    secret = cloud.password("admin")
    lifecycle.prepare(cloud)
    assert cloud.password("admin") == secret
    assert len(set(configs)) == 3
    names = [program.name for program in processes.programs(cloud)]
    assert names == [
        "identity",
        "image",
        "api",
        "conductor",
        "scheduler",
        "placement",
        "image-gateway",
        "agent",
        "agent-2",
    ]
    assert all(secret not in " ".join(program.command) for program in processes.programs(cloud))
