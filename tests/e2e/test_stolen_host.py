# SPDX-License-Identifier: Apache-2.0
"""A thief has root on a host of a lab, with its files, keys, processes and network.

The thief can read, change and start only the guests of that host. The attacks succeeded before
hosts had keys of their own. tests/contract (broker, messages, tickets, libvirt) and
tests/workflows/test_stolen_host.py test them separately, and this file with real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from amqp.exceptions import AccessRefused
from oslo_config import cfg

from common.domain import errors, states
from common.domain.command_progress import CommandPhase, CommandProgress
from common.domain.models import DomainState, Result
from common.rpc.broker import opener
from common.security import broker_identities, tls
from common.security.host_keys import OwnKeys
from common.service import config
from compute_agent.transfer import client as transfer
from compute_agent.verb_context import VerbFailed
from compute_api.metadata.proxy_headers import signature
from deploy.one_machine.cloud import certificates
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import PASSWORDS
from deploy.one_machine.cloud.configuration import LIVE_MIGRATION_PORT
from deploy.one_machine.cloud.process_control import find_process
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key
from deploy.packages import ROOT
from tests.broker_attempts import attempts
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT
from tests.e2e.mini_guest import MiniGuest, mini_guest
from tests.thief import Thief
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

STOLEN, OTHER, THIRD = "lab1", "lab2", "lab3"
#: Largest size of a file in bytes that is searched. Disks and images are larger.
READ_AT_MOST = 1 << 20


@dataclass(frozen=True)
class Loot:
    """The data that root finds on the host.

    Attributes:
        text: The contents of files, environments and command lines.
    """

    conf: cfg.ConfigOpts
    keys: OwnKeys
    network_key: str
    text: str


def collect_loot(lab: LiveLab) -> Loot:
    cloud, number = lab.cloud, lab.lab.number(STOLEN)
    files = [
        cloud.config(STOLEN),
        cloud.network_key(STOLEN),
        *(
            path
            for folder in (cloud.state_folder(number), cloud.network_folder(number))
            for path in folder.rglob("*")
            if path.is_file() and path.stat().st_size < READ_AT_MOST
        ),
    ]
    space = Path(f"/run/netns/{cloud.underlay.namespace(number)}").stat().st_ino
    files += [
        process / name
        for process in Path("/proc").glob("[0-9]*")
        for name in ("environ", "cmdline")
        if _space(process) == space
    ]
    text = "\n".join(path.read_bytes().decode(errors="replace") for path in files if path.exists())
    return Loot(
        config.load(str(cloud.config(STOLEN))),
        OwnKeys.read(cloud.state_folder(number) / "host.key", STOLEN),
        cloud.network_key(STOLEN).read_text().strip(),
        text,
    )


def _space(process: Path) -> int | None:
    try:
        return (process / "ns/net").stat().st_ino
    except OSError:
        return None


@contextmanager
def freeze_agent(lab: LiveLab) -> Iterator[None]:
    """Freeze the agent of the host, and close its connections, for a with block."""
    agent = find_process(lab.cloud, "agent")
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    user = broker_identities.of_host(STOLEN, "").user
    # The frozen agent must not receive messages either.
    Broker.of(lab.cloud).control("close_all_user_connections", user, "the host is in other hands")
    try:
        yield
    finally:
        os.kill(agent, signal.SIGCONT)


def read_guest_data(lab: LiveLab, guest: MiniGuest) -> tuple[Any, ...]:
    """Return the data of a guest that a thief could change."""
    [row] = lab.rows(
        "SELECT vm_state, task_state, power_state, host, fence FROM servers WHERE id = ?",
        guest.server,
    )
    events = lab.rows("SELECT id, state FROM actions WHERE server_id = ? ORDER BY id", guest.server)
    guest_state = guest.read_state()
    return (
        tuple(row),
        [tuple(event) for event in events],
        lab.find_domains(guest.server),
        guest_state.canary,
        guest_state.run,
    )


def test_thief_with_root_on_one_host_harms_no_other_host_or_guest(lab: LiveLab) -> None:
    with mini_guest(lab, "theirs", host=OTHER) as guest:
        before = read_guest_data(lab, guest)
        booty = collect_loot(lab)
        check_loot_has_no_secret_of_cloud(lab, booty)
        with freeze_agent(lab):
            check_broker_refuses_thief(lab, booty)
            check_reports_change_no_other_host(lab, booty, guest)
        check_services_refuse_thief(lab, booty, guest)
        check_transfer_refuses_thief(lab, booty, guest)
        check_libvirtd_refuses_thief(lab, booty)
        lab.await_host(STOLEN)
        assert read_guest_data(lab, guest) == before
        assert lab.find_domains(guest.server) == {OTHER: "running"}
    assert "refused in its name" in lab.doctor().stdout
    lab.forget_refusals()


def check_loot_has_no_secret_of_cloud(lab: LiveLab, booty: Loot) -> None:
    others = [
        json.loads((lab.cloud.state_folder(lab.lab.number(host)) / "host.key").read_text())["keys"]
        for host in lab.cloud.hosts
        if host != STOLEN
    ]
    secrets = {name: lab.cloud.password(name) for name in PASSWORDS}
    secrets |= {
        f"key {number} of another host": key
        for number, keys in enumerate(others)
        for key in keys.values()
    }
    assert [name for name, secret in secrets.items() if secret in booty.text] == []
    assert booty.network_key in booty.text, "it was looked for in the right places"


def check_broker_refuses_thief(lab: LiveLab, booty: Loot) -> None:
    connect = opener(booty.conf, booty.keys.transport_url)
    for operation, attempt in attempts(STOLEN, OTHER).items():
        with connect() as connection, pytest.raises(AccessRefused):
            attempt(connection.channel())
            pytest.fail(f"a thief may {operation}")


def check_reports_change_no_other_host(lab: LiveLab, booty: Loot, guest: MiniGuest) -> None:
    server = guest.server
    [(fence,)] = lab.rows("SELECT fence FROM servers WHERE id = ?", server)
    keys = [
        f"do/{action}/{step}/1"
        for (action,) in lab.rows("SELECT id FROM actions WHERE server_id = ?", server)
        for step in ("destroy", "build", "start")
    ] + [f"cleanup/{server}/ensure_absent/{fence}"]
    with closing(Thief(booty.conf, booty.keys)) as thief:
        for power in (states.SHUTDOWN, states.RUNNING, states.CRASHED):
            for reported_fence in (fence, fence + 1, 2**40):
                answer = thief.send_report(changed=[DomainState(server, power, reported_fence)])
                assert not answer.commands
                thief.send_report(domains=[DomainState(server, power, reported_fence)])
        for status in ("done", "failed", "refused", "unknown"):
            answer = thief.send_report(
                results=[Result(key, server, fence, status, known_fence=2**40) for key in keys]
            )
            assert not answer.commands
        thief.send_report(
            phases=dict.fromkeys(keys, CommandProgress(CommandPhase.STARTING)),
            moved={key: {"memory_total": 1} for key in keys},
        )
        with pytest.raises(errors.NoAnswer):
            thief.send_report(host=OTHER, changed=[DomainState(server, states.SHUTDOWN, fence)])


def check_services_refuse_thief(lab: LiveLab, booty: Loot, guest: MiniGuest) -> None:
    cloud, server = lab.cloud, guest.server
    [(project, address)] = [
        (row[0], guest.fixed_address())
        for row in lab.rows("SELECT project_id FROM servers WHERE id = ?", server)
    ]
    metadata_headers = {
        "X-Instance-ID": server,
        "X-Tenant-ID": project,
        "X-Forwarded-For": address,
        "X-Instance-ID-Signature": signature(booty.network_key, server),
    }
    wiring = {HEADER: wiring_key(booty.network_key)}
    image, proof = lab.image(), certificates.of(cloud, STOLEN)
    assert proof is not None
    requests_by_name: dict[str, tuple[str, dict[str, str], set[int]]] = {
        "metadata of another host's guest": (
            f"{cloud.metadata_url}/latest/user-data",
            metadata_headers | {"X-Instance-Host": STOLEN},
            {404},
        ),
        "metadata in another host's name": (
            f"{cloud.metadata_url}/latest/user-data",
            metadata_headers | {"X-Instance-Host": OTHER},
            {403},
        ),
        "metadata as Neutron's proxies ask": (
            f"{cloud.metadata_url}/latest/user-data",
            metadata_headers,
            {403},
        ),
        "wiring of another host": (
            f"{cloud.network_url}/v2.0/kilonova/hosts/{OTHER}/description",
            wiring,
            {401},
        ),
        "ports": (f"{cloud.network_url}/v2.0/ports", wiring, {401}),
        "an image without a ticket": (f"{cloud.image_gateway_url}/images/{image}", {}, {401, 404}),
        "an image with a token of one's own": (
            f"{cloud.image_gateway_url}/images/{image}",
            {"X-Auth-Token": booty.network_key},
            {401, 404},
        ),
        "servers": (f"{cloud.api_url}/v2.1/servers", {"X-Auth-Token": booty.network_key}, {401}),
        "servers, by forged headers": (
            f"{cloud.api_url}/v2.1/servers",
            {"X-Identity-Status": "Confirmed", "X-Roles": "admin", "X-Project-Id": project},
            {401},
        ),
        "users": (f"{cloud.identity_url}/users", {"X-Auth-Token": booty.network_key}, {401}),
        "allocations": (
            f"{cloud.placement_url}/allocations/{server}",
            {"X-Auth-Token": booty.network_key},
            {401},
        ),
    }
    for secret, (url, headers, expected) in requests_by_name.items():
        answer = requests.get(
            url, headers=headers, timeout=30, verify=proof.ca, cert=(proof.cert, proof.key)
        )
        assert answer.status_code in expected, (
            f"a thief gets {secret}: {answer.status_code} {answer.text[:200]}"
        )


def check_transfer_refuses_thief(lab: LiveLab, booty: Loot, guest: MiniGuest) -> None:
    """Check that the other host serves no files to the thief without the secret of a move.

    Here no move is running, so no secret is valid.
    """
    address = lab.facts(OTHER)["transfer"]
    for secret in ("", "0" * 64, guest.server):
        with pytest.raises((VerbFailed, errors.Problem)):
            transfer.peer(
                address, guest.server, secret, tls=tls.of(booty.conf), silence_timeout=3
            ).parts()


#: A script for the stolen host's network namespace, with the host's certificate. It connects to the
#: other host's ports until it is killed, and prints each outcome once.
CALL_SCRIPT = textwrap.dedent("""
    import json, socket, sys, time
    from common.security.tls import Tls
    address, ports, files = json.loads(sys.argv[1])
    told = set()

    def call(port):
        try:
            plain = socket.create_connection((address, port), 5)
        except OSError:
            return "closed"
        try:
            with Tls(*files).for_client().wrap_socket(plain, server_hostname=address) as secured:
                return "WELCOME" if secured.recv(1) == b"\\1" else "refused"
        except OSError:
            return "refused"

    while True:
        for port in ports:
            outcome = f"{port} {call(port)}"
            if outcome not in told:
                told.add(outcome)
                print(outcome, flush=True)
        time.sleep(0.02)     # others work on this machine too
""")


def check_libvirtd_refuses_thief(lab: LiveLab, booty: Loot) -> None:
    """Check that the other host refuses the thief, also during a third host's migration."""
    cloud, number = lab.cloud, lab.lab.number(STOLEN)
    files, ports = certificates.of(cloud, STOLEN), [16514, 16509, LIVE_MIGRATION_PORT]
    arguments = json.dumps([cloud.host_address(lab.lab.number(OTHER)), ports, files])
    with (
        mini_guest(lab, "passing", host=THIRD) as guest,
        run_in_namespace(cloud.underlay.namespace(number), CALL_SCRIPT, arguments) as calls,
    ):
        before = guest.read_state()
        reply = lab.rest("kilonova-admin").act(
            guest.server, "os-migrateLive", {"host": OTHER, "block_migration": "auto"}
        )
        assert reply.status == 202, reply
        await_true(
            lambda: lab.host_of(guest.server) == OTHER, BOOT, lambda: lab.host_of(guest.server)
        )
        guest.rest.await_status(guest.server, "ACTIVE")
        assert guest.read_state().run == before.run
        calls.kill()
        outcomes = set(calls.communicate()[0].splitlines())
    assert outcomes >= {
        "16514 closed",
        "16509 closed",
        f"{LIVE_MIGRATION_PORT} closed",
        f"{LIVE_MIGRATION_PORT} refused",
    }
    assert not {outcome for outcome in outcomes if "WELCOME" in outcome}


@contextmanager
def run_in_namespace(space: str, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script in a network namespace for a with block."""
    with subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{space}", sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
