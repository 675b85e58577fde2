# SPDX-License-Identifier: Apache-2.0
"""``kilonova doctor``: the oracle, on a live cloud, read only.

It checks the records (``common.store.doctor``), asks every host that is up what really runs there,
the network service what ports servers have, and the catalogue whether it names what they need. A
finding counts when it is there twice, some
seconds apart: of work that is under way hosts may show more, or less, than the records. Pending
cleanups are shown and are no findings: conductors are at them. The tests judge by the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from oslo_config import cfg

from common import config, errors
from common.rpc import agent
from common.rpc.broker import opener
from common.rpc.host_link import ControlSide
from common.store import doctor as oracle
from common.store import upgrades
from common.store.doctor import Finding
from common.store.engine import Store
from common.store.hosts import host_keys, services

PAUSE = 3.0  # seconds between the two looks; longer than any one transaction
LONG_SECONDS = 30.0  #: after which an action in hand is shown
Domains = Mapping[str, Mapping[str, int]]
Ports = Sequence[Mapping[str, Any]]
FIELDS = ["id", "device_id", "device_owner", "binding:host_id"]


def doctor(options: argparse.Namespace) -> int:
    """Print the findings; 0 when there are none."""
    conf = config.load(options.config)
    store = Store.opened(conf, unhurried=True)
    upgrades.check(store)
    silent: list[str] = []
    ask: Callable[[], Domains] = dict
    link = ControlSide(opener(conf), host_keys.of_all(store, conf))
    ports, missing = of_neighbours(conf, store, silent)
    if not options.no_hosts:
        client = agent.AgentClient(link)
        ask = lambda: ask_hosts(store, client.query, silent)  # noqa: E731
    found = findings(store, ask, ports, missing=missing)
    ages = store.read(oracle.ages)
    link.close()
    store.close()
    if options.json:
        print(
            json.dumps(
                [
                    {"invariant": one.invariant, "subject": one.subject, "text": one.text}
                    for one in found
                ]
            )
        )
    else:
        for one in found:
            print(f"{one.invariant}: {one.subject}: {one.text}")
        for server, what, seconds in ages["cleanups"]:
            print(f"pending cleanup for {seconds:.0f} s: server {server}: {what}")
        for server, what, seconds in ages["actions"]:
            if seconds >= LONG_SECONDS:
                print(f"in hand for {seconds:.0f} s: server {server}: {what}")
        print(f"{len(found)} findings" if found else "all is well")
    for name in sorted(set(silent)):
        print(f"{name} did not answer: what is there is not checked", file=sys.stderr)
    return 1 if found else 0


def no_ports() -> Ports | None:
    """For a cloud without a network service."""
    return None


def none_missing() -> Collection[str]:
    """For a cloud whose catalogue is not asked."""
    return ()


def findings(
    store: Store,
    ask: Callable[[], Domains],
    ports: Callable[[], Ports | None] = no_ports,
    pause: float = PAUSE,
    missing: Callable[[], Collection[str]] = none_missing,
) -> list[Finding]:
    """What is found at two looks, ``pause`` seconds apart."""
    first = _look(store, ask(), ports(), missing())
    if not first:
        return []
    time.sleep(pause)
    return sorted(first & _look(store, ask(), ports(), missing()))


def of_neighbours(
    conf: cfg.ConfigOpts, store: Store, silent: list[str]
) -> tuple[Callable[[], Ports | None], Callable[[], Collection[str]]]:
    """What asks the network service for all ports (None when there is none, or when it does not
    answer), and what asks the catalogue which services it does not name."""
    from common.clients.identity import READ, IdentityClient
    from common.clients.network import NAME
    from common.clients.network_bindings import Bindings
    from common.clients.shares import ShareClient

    identity = IdentityClient(conf, READ)
    client = Bindings(identity.network_url, conf.network.timeout)
    optional = (client, ShareClient(identity.share_url, conf.share.timeout))

    def missing() -> Collection[str]:
        try:
            return {one.section for one in optional if not one.has_service()}
        except errors.Problem:
            silent.append("the identity service")
            return ()

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

    return ask, missing


def ask_hosts(
    store: Store,
    query: Callable[[str, str, dict[str, object]], dict[str, Mapping[str, int]]],
    silent: list[str],
) -> Domains:
    """What each host that is up says it runs; those that do not answer are added to ``silent``."""
    answers = {}
    for row in store.read(lambda tx: services.list_all(tx, binary=services.COMPUTE)):
        if not row.up:
            silent.append(f"host {row.host}")
            continue
        try:
            answers[row.host] = query(row.host, "domains", {})["domains"]
        except errors.Unavailable:
            silent.append(f"host {row.host}")
    return answers


def _look(
    store: Store, domains: Domains, ports: Ports | None, missing: Collection[str]
) -> set[Finding]:
    return set(
        store.snapshot(
            lambda tx: [
                *oracle.check(tx),
                *oracle.compare(domains, tx),
                *(() if ports is None else oracle.compare_ports(ports, tx)),
                *oracle.compare_catalogue(missing, tx),
            ]
        )
    )
