# SPDX-License-Identifier: Apache-2.0
"""``kilonova doctor``: the oracle, on a live cloud, read only.

It checks the records (``common.store.doctor``), asks every host that is up what really runs there,
and the network service what ports servers have. A finding counts when it is there twice, some
seconds apart: of work that is under way hosts may show more, or less, than the records. Pending
cleanups are shown and are no findings: conductors are at them. The tests judge by the same code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
    ports = ports_of(conf, store, silent)
    if not options.no_hosts:
        client = agent.AgentClient(link)
        ask = lambda: ask_hosts(store, client.query, silent)  # noqa: E731
    found = findings(store, ask, ports)
    pending = store.read(oracle.ages)["cleanups"]
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
        for server, what, seconds in pending:
            print(f"pending cleanup for {seconds:.0f} s: server {server}: {what}")
        print(f"{len(found)} findings" if found else "all is well")
    for name in sorted(set(silent)):
        print(f"{name} did not answer: what is there is not checked", file=sys.stderr)
    return 1 if found else 0


def no_ports() -> Ports | None:
    """For a cloud without a network service."""
    return None


def findings(
    store: Store,
    ask: Callable[[], Domains],
    ports: Callable[[], Ports | None] = no_ports,
    pause: float = PAUSE,
) -> list[Finding]:
    """What is found at two looks, ``pause`` seconds apart."""
    first = _look(store, ask(), ports())
    if not first:
        return []
    time.sleep(pause)
    return sorted(first & _look(store, ask(), ports()))


def ports_of(conf: cfg.ConfigOpts, store: Store, silent: list[str]) -> Callable[[], Ports | None]:
    """Asks the network service for all ports; None when there is none, or when it does not
    answer."""
    from common.clients.identity import READ, IdentityClient
    from common.clients.network import NAME
    from common.clients.network_bindings import Bindings

    identity = IdentityClient(conf, READ)
    client = Bindings(identity.network_url, conf.network.timeout)

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

    return ask


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


def _look(store: Store, domains: Domains, ports: Ports | None) -> set[Finding]:
    return set(
        store.snapshot(
            lambda tx: [
                *oracle.check(tx),
                *oracle.compare(domains, tx),
                *(() if ports is None else oracle.compare_ports(ports, tx)),
            ]
        )
    )
