# SPDX-License-Identifier: Apache-2.0
"""A host of a lab in other hands, whole: its files, its keys, its processes, its place in the
network. Nothing but what concerns its own guests is read, changed or started.

What a thief tries is what was tried on a running cloud before hosts had keys of their own. The
parts of it are tried one by one in tests/contract (broker, messages, tickets, libvirt's calls) and
tests/workflows/test_stolen_host.py; here they meet the real processes.
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
from tests.e2e.guests import Witness, witness
from tests.e2e.lab import LiveLab
from tests.e2e.live import BOOT
from tests.thief import Thief
from tests.waiting import await_true

pytestmark = pytest.mark.slice("operations")

STOLEN, OTHER, THIRD = "lab1", "lab2", "lab3"
#: Of one file; disks of guests and images are not where secrets of the cloud are looked for.
READ_AT_MOST = 1 << 20


@dataclass(frozen=True)
class Loot:
    """What root finds on the host: its keys, and the text of its files, environments and command
    lines."""

    conf: cfg.ConfigOpts
    keys: OwnKeys
    network_key: str
    text: str


def loot(lab: LiveLab) -> Loot:
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
def silent(lab: LiveLab) -> Iterator[None]:
    """The host's own agent says nothing for the block."""
    agent = find_process(lab.cloud, "agent")
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    user = broker_identities.of_host(STOLEN, "").user
    # nor does it hear
    Broker.of(lab.cloud).control("close_all_user_connections", user, "the host is in other hands")
    try:
        yield
    finally:
        os.kill(agent, signal.SIGCONT)


def account(lab: LiveLab, guest: Witness) -> tuple[Any, ...]:
    """All that a thief could have changed of a guest."""
    [row] = lab.rows(
        "SELECT vm_state, task_state, power_state, host, fence FROM servers WHERE id = ?",
        guest.server,
    )
    events = lab.rows("SELECT id, state FROM actions WHERE server_id = ? ORDER BY id", guest.server)
    told = guest.account()
    return (
        tuple(row),
        [tuple(one) for one in events],
        lab.where(guest.server),
        told.canary,
        told.run,
    )


def test_a_stolen_host_is_one_stolen_host(lab: LiveLab) -> None:
    with witness(lab, "theirs", host=OTHER) as guest:
        before = account(lab, guest)
        found = loot(lab)
        holds_no_secret_of_the_cloud(lab, found)
        with silent(lab):
            is_refused_at_the_broker(lab, found)
            changes_nothing_of_others_by_its_reports(lab, found, guest)
        is_refused_by_services(lab, found, guest)
        reads_no_files_of_others(lab, found, guest)
        commands_no_libvirtd(lab, found)
        lab.await_host(STOLEN)
        assert account(lab, guest) == before
        assert lab.where(guest.server) == {OTHER: "running"}


def holds_no_secret_of_the_cloud(lab: LiveLab, found: Loot) -> None:
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
    assert [name for name, secret in secrets.items() if secret in found.text] == []
    assert found.network_key in found.text, "it was looked for in the right places"


def is_refused_at_the_broker(lab: LiveLab, found: Loot) -> None:
    connect = opener(found.conf, found.keys.transport_url)
    for what, attempt in attempts(STOLEN, OTHER).items():
        with connect() as connection, pytest.raises(AccessRefused):
            attempt(connection.channel())
            pytest.fail(f"a thief may {what}")


def changes_nothing_of_others_by_its_reports(lab: LiveLab, found: Loot, guest: Witness) -> None:
    server = guest.server
    [(fence,)] = lab.rows("SELECT fence FROM servers WHERE id = ?", server)
    keys = [
        f"do/{action}/{step}/1"
        for (action,) in lab.rows("SELECT id FROM actions WHERE server_id = ?", server)
        for step in ("destroy", "build", "start")
    ] + [f"cleanup/{server}/ensure_absent/{fence}"]
    with closing(Thief(found.conf, found.keys)) as thief:
        for power in (states.SHUTDOWN, states.RUNNING, states.CRASHED):
            for known in (fence, fence + 1, 2**40):
                answer = thief.say(changed=[DomainState(server, power, known)])
                assert not answer.commands
                thief.say(domains=[DomainState(server, power, known)])
        for status in ("done", "failed", "refused", "unknown"):
            answer = thief.say(
                results=[Result(key, server, fence, status, known_fence=2**40) for key in keys]
            )
            assert not answer.commands
        thief.say(
            phases=dict.fromkeys(keys, CommandProgress(CommandPhase.STARTING)),
            moved={key: {"memory_total": 1} for key in keys},
        )
        with pytest.raises(errors.NoAnswer):
            thief.say(host=OTHER, changed=[DomainState(server, states.SHUTDOWN, fence)])


def is_refused_by_services(lab: LiveLab, found: Loot, guest: Witness) -> None:
    cloud, server = lab.cloud, guest.server
    [(project, address)] = [
        (row[0], guest.fixed())
        for row in lab.rows("SELECT project_id FROM servers WHERE id = ?", server)
    ]
    asks = {
        "X-Instance-ID": server,
        "X-Tenant-ID": project,
        "X-Forwarded-For": address,
        "X-Instance-ID-Signature": signature(found.network_key, server),
    }
    wiring = {HEADER: wiring_key(found.network_key)}
    image, proof = lab.image(), certificates.of(cloud, STOLEN)
    assert proof is not None
    tries: dict[str, tuple[str, dict[str, str], set[int]]] = {
        "metadata of another host's guest": (
            f"{cloud.metadata_url}/latest/user-data",
            asks | {"X-Instance-Host": STOLEN},
            {404},
        ),
        "metadata in another host's name": (
            f"{cloud.metadata_url}/latest/user-data",
            asks | {"X-Instance-Host": OTHER},
            {403},
        ),
        "metadata as Neutron's proxies ask": (
            f"{cloud.metadata_url}/latest/user-data",
            asks,
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
            {"X-Auth-Token": found.network_key},
            {401, 404},
        ),
        "servers": (f"{cloud.api_url}/v2.1/servers", {"X-Auth-Token": found.network_key}, {401}),
        "servers, by forged headers": (
            f"{cloud.api_url}/v2.1/servers",
            {"X-Identity-Status": "Confirmed", "X-Roles": "admin", "X-Project-Id": project},
            {401},
        ),
        "users": (f"{cloud.identity_url}/users", {"X-Auth-Token": found.network_key}, {401}),
        "allocations": (
            f"{cloud.placement_url}/allocations/{server}",
            {"X-Auth-Token": found.network_key},
            {401},
        ),
    }
    for what, (url, headers, expected) in tries.items():
        answer = requests.get(
            url, headers=headers, timeout=30, verify=proof.ca, cert=(proof.cert, proof.key)
        )
        assert answer.status_code in expected, (
            f"a thief gets {what}: {answer.status_code} {answer.text[:200]}"
        )


def reads_no_files_of_others(lab: LiveLab, found: Loot, guest: Witness) -> None:
    """The source of a move gives files to whoever brings the secret of that move; there is no move,
    and no secret."""
    address = lab.facts(OTHER)["transfer"]
    for secret in ("", "0" * 64, guest.server):
        with pytest.raises((VerbFailed, errors.Problem)):
            transfer.peer(
                address, guest.server, secret, tls=tls.of(found.conf), silence_timeout=3
            ).parts()


#: In the stolen host's network, with its certificate: calls the other host's ports until it is
#: killed, and tells what comes of it, once each.
CALLS = textwrap.dedent("""
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


def commands_no_libvirtd(lab: LiveLab, found: Loot) -> None:
    """Nor while a guest of a third host goes to the other one, which listens for that."""
    cloud, number = lab.cloud, lab.lab.number(STOLEN)
    files, ports = certificates.of(cloud, STOLEN), [16514, 16509, LIVE_MIGRATION_PORT]
    told = json.dumps([cloud.host_address(lab.lab.number(OTHER)), ports, files])
    with (
        witness(lab, "passing", host=THIRD) as guest,
        running_in(cloud.underlay.namespace(number), CALLS, told) as calls,
    ):
        before = guest.account()
        reply = lab.rest("kilonova-admin").act(
            guest.server, "os-migrateLive", {"host": OTHER, "block_migration": "auto"}
        )
        assert reply.status == 202, reply
        await_true(lambda: lab.place(guest.server) == OTHER, BOOT, lambda: lab.place(guest.server))
        guest.rest.await_status(guest.server, "ACTIVE")
        assert guest.account().run == before.run
        calls.kill()
        outcomes = set(calls.communicate()[0].splitlines())
    assert outcomes >= {
        "16514 closed",
        "16509 closed",
        f"{LIVE_MIGRATION_PORT} closed",
        f"{LIVE_MIGRATION_PORT} refused",
    }
    assert not {one for one in outcomes if "WELCOME" in one}


@contextmanager
def running_in(space: str, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A script in a network namespace, until the end of the block."""
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
