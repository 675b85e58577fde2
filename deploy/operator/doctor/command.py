# SPDX-License-Identifier: Apache-2.0
"""``kilonova doctor``: checks a live cloud read-only. ``--fix ID`` repairs a finding.

The command checks the records (``deploy.operator.doctor``) and compares them with the answers of
hosts and external services:

* every host that is up: its guests and their volumes
* the network service: ports of servers
* the block storage service: attachments
* the image service: incomplete snapshots
* the shared file system service: rules that let hosts mount shares
* the catalogue: the services that the cloud needs

A finding is reported if two checks some seconds apart both have the finding, because hosts may be
ahead of or behind the records while actions run. Pending cleanups are shown but are no findings,
because conductors work on them. Tests use the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from oslo_config import cfg

from common.domain import errors
from common.domain.service_binaries import Binary
from common.domain.text import one_line
from common.rpc import agent
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide
from common.service import config
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_keys, services
from deploy.operator import doctor as oracle
from deploy.operator.database import explain_silence
from deploy.operator.doctor import Finding
from deploy.operator.doctor import fix as doctor_fix
from deploy.operator.doctor.images import IN_TRANSIT
from deploy.operator.doctor.kinds import KINDS, Mender
from deploy.operator.hosts import list as hosts
from deploy.operator.hosts.facts import Disks, Domains, Files, ask_disks, ask_files, ask_hosts

# Seconds between the two checks, longer than any transaction.
PAUSE = 3.0
# The limit of a finding's text.
MAX_TEXT_CHARACTERS = 2000
#: The age in seconds from which a running action is shown.
LONG_SECONDS = 30.0
Ports = Sequence[Mapping[str, Any]]
Images = Sequence[Mapping[str, Any]]
Attachments = Sequence[Mapping[str, Any]]
Rules = Sequence[Mapping[str, Any]]
#: Exit status, as of ``kilonova explain``.
NO_ANSWER = 3
FIELDS = ["id", "device_id", "device_owner", "binding:host_id"]


def doctor(options: argparse.Namespace) -> int:
    """Print the findings, or repair the named findings.

    Returns:
        Without ``--fix``: 1 if there are findings. Otherwise ``NO_ANSWER`` if a service, or a host
        that counts as up, did not answer, and 0 if all did.
        With ``--fix``: 1 if a repair failed, otherwise 0.
        In both cases ``NO_ANSWER`` if the database does not answer before a repair.
    """
    conf = config.load(options.config)
    try:
        with closing(Store.open(conf, unhurried=True)) as store:
            upgrades.check(store)
            return _examine(conf, store, options)
    except errors.Unavailable as problem:
        print(f"kilonova: {explain_silence(options.config, problem)}", file=sys.stderr)
        return NO_ANSWER


def _examine(conf: cfg.ConfigOpts, store: Store, options: argparse.Namespace) -> int:
    silent: list[str] = []
    ask: Callable[[], Domains] = dict
    with closing(ControlSide(opener(conf), host_keys.of_all(store, conf))) as link:
        services = of_neighbours(conf, store, silent)
        if not options.no_hosts:
            client = agent.AgentClient(link)
            ask = partial(ask_hosts, store, client.query, silent)
            services = replace(
                services,
                disks=lambda: ask_disks(store, client.query),
                files=lambda: ask_files(store, client.query),
            )
        current = findings(store, ask, services)
        if options.fix:
            domains, answers = ask(), services.ask()
            return doctor_fix.fix(
                store,
                options.fix,
                current,
                lambda tx: _check_all(tx, domains, answers),
                doctor_fix.guest_commands(options.config),
            )
    unchecked = sorted(set(silent) - _down(store))
    tell(store, current, options.json, unchecked)
    for name in sorted(set(silent)):
        print(f"{name} did not answer, so its objects were not checked", file=sys.stderr)
    return status(current, unchecked)


def status(current: Sequence[Finding], silent: Collection[str]) -> int:
    """Return the exit status: 1 with findings, else ``NO_ANSWER`` with silent objects, else 0.

    Args:
        current: The findings.
        silent: Hosts and services that should have answered and did not.
    """
    return 1 if current else NO_ANSWER if silent else 0


def _down(store: Store) -> set[str]:
    """Return "host NAME" of each compute host that counts as down.

    These hosts do not count as unchecked, because the doctor expects no answer of them.
    """
    rows = store.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE))
    return {f"host {row.host}" for row in rows if not row.up}


def tell(
    store: Store, current: Sequence[Finding], as_json: bool, unseen: Sequence[str] = ()
) -> None:
    """Print the findings with cause and remedy.

    Without ``as_json`` also print pending cleanups, actions that run for ``LONG_SECONDS``, refusals
    of hosts, and the hosts and services that did not answer.

    Args:
        store: The database.
        current: The findings.
        as_json: True to print one JSON document with the findings only.
        unseen: Hosts and services that did not answer.
    """
    if as_json:
        print(json.dumps([facts(finding) for finding in current]))
        return
    for finding in current:
        kind = KINDS[finding.kind]
        print(
            f"{finding.invariant}: {one_line(finding.subject)}: {one_line(finding.text, MAX_TEXT_CHARACTERS)}"
        )
        print(f"    cause   {kind.cause}")
        print(f"    remedy  {kind.remedy}")
        if kind.way is not Mender.OPERATOR:
            print(f"    kilonova doctor --fix {finding.id}")
    ages = store.read(oracle.ages)
    for server, work, seconds in ages["cleanups"]:
        print(f"pending cleanup for {seconds:.0f} s: server {server}: {one_line(work)}")
    for server, work, seconds in ages["actions"]:
        if seconds >= LONG_SECONDS:
            print(f"in hand for {seconds:.0f} s: server {server}: {one_line(work)}")
    refusals = store.read(hosts.notices)
    for line in refusals:
        print(line)
    is_incomplete = unseen or refusals
    result = (
        f"{len(current)} findings"
        if current
        else "nothing found"
        if is_incomplete
        else "all is well"
    )
    print(result + (f"; not checked: {', '.join(unseen)}" if unseen else ""))


def facts(finding: Finding) -> dict[str, str]:
    """Return the finding for JSON output."""
    kind = KINDS[finding.kind]
    return {
        "id": finding.id,
        "kind": finding.kind,
        "invariant": finding.invariant,
        "subject": finding.subject,
        "text": finding.text,
        "cause": kind.cause,
        "remedy": kind.remedy,
        "way": str(kind.way),
    }


def nothing() -> None:
    """Return None. The default for a service or host that is not queried."""


def none_missing() -> Collection[str]:
    """Return no services. The default if the catalogue is not checked."""
    return ()


@dataclass(frozen=True)
class NeighbourAnswers:
    """The answers of external services and hosts at one check.

    None means that the service does not exist, did not answer, or was not queried. ``missing`` is
    then empty.
    """

    ports: Ports | None
    attachments: Attachments | None
    images: Images | None
    missing: Collection[str]
    disks: Disks | None = None
    files: Files | None = None
    rules: Rules | None = None


@dataclass(frozen=True)
class Neighbours:
    """The functions that query external services and hosts."""

    #: All ports, from the network service.
    ports: Callable[[], Ports | None] = nothing
    #: All attachments, from the block storage service.
    attachments: Callable[[], Attachments | None] = nothing
    #: Incomplete images, from the image service.
    images: Callable[[], Images | None] = nothing
    #: Services that the catalogue does not name.
    missing: Callable[[], Collection[str]] = none_missing
    #: Volumes of guests, from hosts.
    disks: Callable[[], Disks | None] = nothing
    #: Files without a guest, from hosts.
    files: Callable[[], Files | None] = nothing
    #: Kilonova's own rules, from the shared file system service.
    rules: Callable[[], Rules | None] = nothing

    def ask(self) -> NeighbourAnswers:
        """Call each function once, and return the answers."""
        return NeighbourAnswers(
            self.ports(),
            self.attachments(),
            self.images(),
            self.missing(),
            self.disks(),
            self.files(),
            self.rules(),
        )


def findings(
    store: Store,
    ask: Callable[[], Domains],
    neighbours: Neighbours = Neighbours(),
    pause: float = PAUSE,
) -> list[Finding]:
    """Return the findings that two checks, ``pause`` seconds apart, both have.

    Args:
        store: The database.
        ask: Queries the hosts for their guests.
        neighbours: Queries the external services, and the hosts for volumes and files.
        pause: Seconds between the checks. If the first check has no findings, there is no second.
    """
    first = _check_snapshot(store, ask(), neighbours.ask())
    if not first:
        return []
    time.sleep(pause)
    second = _check_snapshot(store, ask(), neighbours.ask())
    return sorted(finding for finding in second if finding in first)


def of_neighbours(conf: cfg.ConfigOpts, store: Store, silent: list[str]) -> Neighbours:
    """Return the functions that query the external services of this cloud.

    The functions for hosts (``disks``, ``files``) are left at their defaults.

    Args:
        conf: The configuration.
        store: The database.
        silent: The functions append the name of a service that does not answer or refuses.
    """
    from common.clients.identity import READ, IdentityClient
    from common.clients.network import NAME
    from common.clients.network_bindings import Bindings
    from common.clients.own_images import OwnImages
    from common.clients.shares import NAME as SHARES
    from common.clients.shares import ShareClient
    from common.clients.volumes import NAME as VOLUMES
    from common.clients.volumes import VolumeClient

    identity = IdentityClient(conf, READ)
    client = Bindings(identity.network_url, conf.network.timeout)
    volumes = VolumeClient(identity.volume_url, conf.volume.timeout)
    shares = ShareClient(identity.share_url, conf.share.timeout)
    optional = (client, shares, volumes)

    def missing() -> Collection[str]:
        try:
            return {service.section for service in optional if not service.has_service()}
        except errors.Problem:
            silent.append("the identity service")
            return ()

    def attachments() -> Attachments | None:
        try:
            if not volumes.has_service():
                return None
            records = volumes.every_attachment(identity.token())
            return [asdict(service) for service in records]
        except errors.Problem:
            silent.append(f"the {VOLUMES}")
            return None

    def rules() -> Rules | None:
        try:
            return shares.own_rules(identity.token()) if shares.has_service() else None
        except errors.Problem:
            silent.append(f"the {SHARES}")
            return None

    def ask() -> Ports | None:
        try:
            if not client.has_service():
                return None
            token, wanderers = identity.token(), store.read(oracle.wanderers)
            return [
                port | {"bindings": client.bindings(token, port["id"])}
                if port["device_id"] in wanderers
                else port
                for port in client.ports(token, fields=FIELDS)
            ]
        except errors.Problem:
            silent.append(f"the {NAME}")
            return None

    def find(status: str) -> Images:
        return own.ask(lambda client, token: client.find({"status": status}, token))

    def ask_images() -> Images | None:
        try:
            return [service for status in IN_TRANSIT for service in find(status)]
        except errors.Problem:
            silent.append("the image service")
            return None

    own = OwnImages(identity)
    return Neighbours(ask, attachments, ask_images, missing, rules=rules)


def _check_snapshot(store: Store, domains: Domains, answers: NeighbourAnswers) -> set[Finding]:
    return set(store.snapshot(lambda tx: _check_all(tx, domains, answers)))


def _check_all(tx: Connection, domains: Domains, answers: NeighbourAnswers) -> list[Finding]:
    return [
        *oracle.check(tx),
        *oracle.compare(domains, tx),
        *oracle.compare_reported(domains.keys(), tx),
        *(() if answers.disks is None else oracle.compare_guests(answers.disks, tx)),
        *oracle.compare_files(answers.files or {}, tx),
        *(() if answers.ports is None else oracle.compare_ports(answers.ports, tx)),
        *(() if answers.attachments is None else oracle.compare_volumes(answers.attachments, tx)),
        *(() if answers.rules is None else oracle.compare_rules(answers.rules, tx)),
        *(() if answers.images is None else oracle.compare_images(answers.images, tx)),
        *oracle.compare_catalogue(answers.missing, tx),
    ]
