# SPDX-License-Identifier: Apache-2.0
"""``kilonova doctor``: the oracle, on a live cloud, read only; ``--fix ID`` mends what it found.

It checks the records (``deploy.operator.doctor``), asks every host that is up what really runs
there and with which volumes,
the network service what ports servers have, the block storage service what attachments, the image
service which snapshots are not whole, the shared file system service which rules let hosts mount
shares, and the catalogue whether it names what they need. A finding
counts when it is there twice, some seconds apart: of work that is under way hosts may show more, or
less, than the records. Pending cleanups are shown and are no findings: conductors are at them. The
tests judge by the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
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

PAUSE = 3.0  # seconds between the two looks; longer than any one transaction
MAX_TEXT_CHARACTERS = 2000  # of a finding
LONG_SECONDS = 30.0  #: after which an action in hand is shown
Ports = Sequence[Mapping[str, Any]]
Images = Sequence[Mapping[str, Any]]
Attachments = Sequence[Mapping[str, Any]]
Rules = Sequence[Mapping[str, Any]]
NO_ANSWER = 3  #: status: as of ``kilonova explain``
FIELDS = ["id", "device_id", "device_owner", "binding:host_id"]


def doctor(options: argparse.Namespace) -> int:
    """Print the findings, or mend those that are named. 0: there are none, or they are mended; 1:
    there are, or some are not; ``NO_ANSWER``: none, as far as could be looked."""
    conf = config.load(options.config)
    try:
        with closing(Store.opened(conf, unhurried=True)) as store:
            upgrades.check(store)
            return _examine(conf, store, options)
    except errors.Unavailable as problem:
        print(f"kilonova: {explain_silence(options.config, problem)}", file=sys.stderr)
        return NO_ANSWER


def _examine(conf: cfg.ConfigOpts, store: Store, options: argparse.Namespace) -> int:
    silent: list[str] = []
    ask: Callable[[], Domains] = dict
    with closing(ControlSide(opener(conf), host_keys.of_all(store, conf))) as link:
        neighbours = of_neighbours(conf, store, silent)
        if not options.no_hosts:
            client = agent.AgentClient(link)
            ask = lambda: ask_hosts(store, client.query, silent)  # noqa: E731
            neighbours = replace(
                neighbours,
                disks=lambda: ask_disks(store, client.query),
                files=lambda: ask_files(store, client.query),
            )
        found = findings(store, ask, neighbours)
        if options.fix:
            domains, answers = ask(), neighbours.ask()
            return doctor_fix.fix(
                store,
                options.fix,
                found,
                lambda tx: _looked(tx, domains, answers),
                doctor_fix.guest_commands(options.config),
            )
    unseen = sorted(set(silent) - _down(store))
    tell(store, found, options.json, unseen)
    for name in sorted(set(silent)):
        print(f"{name} did not answer: what is there is not checked", file=sys.stderr)
    return status(found, unseen)


def status(found: Sequence[Finding], silent: Collection[str]) -> int:
    """For monitoring; ``silent``: who should have answered."""
    return 1 if found else NO_ANSWER if silent else 0


def _down(store: Store) -> set[str]:
    """Hosts that are known to be down, which is no matter of the doctor."""
    rows = store.read(lambda tx: services.list_all(tx, binary=Binary.COMPUTE))
    return {f"host {row.host}" for row in rows if not row.up}


def tell(store: Store, found: Sequence[Finding], as_json: bool, unseen: Sequence[str] = ()) -> None:
    """Print the findings. Without ``as_json`` also print remedies, waiting actions, the refusals of
    hosts, and the services and hosts that did not answer (``unseen``)."""
    if as_json:
        print(json.dumps([facts(one) for one in found]))
        return
    for one in found:
        kind = KINDS[one.kind]
        print(
            f"{one.invariant}: {one_line(one.subject)}: {one_line(one.text, MAX_TEXT_CHARACTERS)}"
        )
        print(f"    cause   {kind.cause}")
        print(f"    remedy  {kind.remedy}")
        if kind.way is not Mender.OPERATOR:
            print(f"    kilonova doctor --fix {one.id}")
    ages = store.read(oracle.ages)
    for server, what, seconds in ages["cleanups"]:
        print(f"pending cleanup for {seconds:.0f} s: server {server}: {one_line(what)}")
    for server, what, seconds in ages["actions"]:
        if seconds >= LONG_SECONDS:
            print(f"in hand for {seconds:.0f} s: server {server}: {one_line(what)}")
    refusals = store.read(hosts.notices)
    for line in refusals:
        print(line)
    is_unsure = unseen or refusals
    result = f"{len(found)} findings" if found else "nothing found" if is_unsure else "all is well"
    print(result + (f"; not looked at: {', '.join(unseen)}" if unseen else ""))


def facts(one: Finding) -> dict[str, str]:
    """For programs."""
    kind = KINDS[one.kind]
    return {
        "id": one.id,
        "kind": one.kind,
        "invariant": one.invariant,
        "subject": one.subject,
        "text": one.text,
        "cause": kind.cause,
        "remedy": kind.remedy,
        "way": str(kind.way),
    }


def nothing() -> None:
    """For a cloud without that service."""


def none_missing() -> Collection[str]:
    """For a cloud whose catalogue is not asked."""
    return ()


@dataclass(frozen=True)
class NeighbourAnswers:
    """What the neighbours said at one look; None: there is no such service, or it did not
    answer."""

    ports: Ports | None
    attachments: Attachments | None
    images: Images | None
    missing: Collection[str]
    disks: Disks | None = None
    files: Files | None = None
    rules: Rules | None = None


@dataclass(frozen=True)
class Neighbours:
    """What asks the network service for all ports, the block storage service for all attachments,
    the image service for images that are not whole, the shared file system service for the rules
    that are ours, the catalogue for services that it does not
    name, and hosts for the volumes of their guests and for files without one."""

    ports: Callable[[], Ports | None] = nothing
    attachments: Callable[[], Attachments | None] = nothing
    images: Callable[[], Images | None] = nothing
    missing: Callable[[], Collection[str]] = none_missing
    disks: Callable[[], Disks | None] = nothing
    files: Callable[[], Files | None] = nothing
    rules: Callable[[], Rules | None] = nothing

    def ask(self) -> NeighbourAnswers:
        """All of them, once."""
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
    """What is found at two looks, ``pause`` seconds apart."""
    first = _look(store, ask(), neighbours.ask())
    if not first:
        return []
    time.sleep(pause)
    second = _look(store, ask(), neighbours.ask())
    return sorted(one for one in second if one in first)


def of_neighbours(conf: cfg.ConfigOpts, store: Store, silent: list[str]) -> Neighbours:
    """How those of this cloud are asked; which do not answer is added to ``silent``."""
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
            return {one.section for one in optional if not one.has_service()}
        except errors.Problem:
            silent.append("the identity service")
            return ()

    def attachments() -> Attachments | None:
        try:
            if not volumes.has_service():
                return None
            found = volumes.every_attachment(identity.token())
            return [asdict(one) for one in found]
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
            return [one for status in IN_TRANSIT for one in find(status)]
        except errors.Problem:
            silent.append("the image service")
            return None

    own = OwnImages(identity)
    return Neighbours(ask, attachments, ask_images, missing, rules=rules)


def _look(store: Store, domains: Domains, answers: NeighbourAnswers) -> set[Finding]:
    return set(store.snapshot(lambda tx: _looked(tx, domains, answers)))


def _looked(tx: Connection, domains: Domains, answers: NeighbourAnswers) -> list[Finding]:
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
