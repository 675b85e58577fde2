# SPDX-License-Identifier: Apache-2.0
"""``kilonova host secrets``: which hosts have the secrets of today's configuration.

An operator who changes a secret continues when all hosts have the new one (docs/secrets.md).
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import sqlalchemy as sa
from oslo_config import cfg
from sqlalchemy.engine import Connection

from common.rpc.host_credentials import secrets_of
from common.store.engine import Store
from common.store.hosts import host_keys, host_status
from common.store.schema import hosts
from deploy.operator.hosts.identity import open_with_secrets

#: Seconds for which ``--wait`` waits, and between two looks.
MAX_WAIT_SECONDS, PAUSE_SECONDS = 120.0, 2.0


def show(options: argparse.Namespace) -> int:
    """Print how many hosts have today's secrets, and the others with their states.

    With ``--wait``, wait up to ``MAX_WAIT_SECONDS`` until all hosts that are up have them.

    Returns:
        0 if all hosts have today's secrets, otherwise 1.

    Raises:
        ConfigError: The configuration lacks a secret.
        Unavailable: The database does not answer.
    """
    conf, store = open_with_secrets(options.config)
    until = time.monotonic() + (MAX_WAIT_SECONDS if options.wait else 0.0)
    try:
        while True:
            digests = _digests(store, conf)
            missing = store.read(partial(_outdated, digests=digests))
            if not any(is_up for _, is_up in missing) or time.monotonic() >= until:
                break
            time.sleep(PAUSE_SECONDS)
    finally:
        store.close()
    print(f"{len(digests) - len(missing)} of {len(digests)} hosts have today's secrets")
    for host, is_up in missing:
        print(
            f"  {host} is up and has others: see the log of its agent"
            if is_up
            else f"  {host} is not up: the agent fetches them once it reaches a conductor. If its keys are older than "
            f"the oldest secret: kilonova host rotate {host}"
        )
    return 1 if missing else 0


def _digests(store: Store, conf: cfg.ConfigOpts) -> dict[str, str]:
    """Return the digest of today's secrets of each host with a key."""
    keys = host_keys.of_all(store, conf)
    return {
        host: secrets_of(keys, host, conf.host_keys.broker_addresses).digest()
        for host in keys.hosts()
    }


def _outdated(tx: Connection, digests: dict[str, str]) -> list[tuple[str, bool]]:
    """Return the hosts whose agents reported another digest, and whether each host is up."""
    reported = {
        row.name: (row.facts or {}).get("secrets")
        for row in tx.execute(sa.select(hosts.c.name, hosts.c.facts))
    }
    states = host_status.host_states(tx)
    return [
        (host, host in states and states[host].answers)
        for host, digest in sorted(digests.items())
        if reported.get(host) != digest
    ]
