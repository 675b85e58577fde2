# SPDX-License-Identifier: Apache-2.0
"""``kilonova host add|rotate|remove``: who may speak as a host: its keys, and its user at the
broker.

The database says which generation of a host's keys counts, the host has them in one file, the
broker knows its user. A command that ended in the middle is made up for by ``rotate``, which begins
with the database too.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from pathlib import Path

from oslo_config import cfg

from common import broker_identities, config, errors
from common.rpc.broker import address_of, url_as
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_keys, hosts, services
from deploy.cli.broker_users import ByHand, Management, Users
from deploy.configuration import write_secret

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
OVERLAP_SECONDS = 3600


def add(options: argparse.Namespace) -> int:
    """Give a host its first keys."""
    conf, store = _opened(options)
    store.write(lambda tx: host_keys.add(tx, options.host))
    return _issue(options, conf, store)


def rotate(options: argparse.Namespace) -> int:
    """Give a host new keys; the ones before count for an hour still, or with ``--now`` no more."""
    conf, store = _opened(options)
    store.write(
        lambda tx: host_keys.rotate(tx, options.host, 0 if options.now else OVERLAP_SECONDS)
    )
    status = _issue(options, conf, store)
    if options.now:
        say(users(conf).disconnect(broker_identities.user_of(options.host)))
    return status


def remove(options: argparse.Namespace) -> int:
    """Take a host's keys away, and what is known of it, when nothing is on it."""
    conf, store = _opened(options)

    def forget(tx: Connection) -> bool:
        for row in services.list_all(tx, options.host, services.COMPUTE):
            hosts.remove(tx, row, row.uuid)
        return host_keys.remove(tx, options.host)

    if not store.write(forget):
        raise errors.NotFound(
            f"Host {options.host} has no keys: kilonova hosts lists those that are known."
        )
    store.close()
    say(users(conf).remove(broker_identities.user_of(options.host)))
    print(f"host {options.host} is not heard any more")
    return 0


def _opened(options: argparse.Namespace) -> tuple[cfg.ConfigOpts, Store]:
    conf = config.load(options.config)
    if NAME.fullmatch(options.host) is None:
        raise config.ConfigError(
            f"{options.host!r} is no name of a host: letters, digits, '.', '_' and '-'"
        )
    for name in ("command_secret", "query_secret"):
        if not conf.host_keys[name]:
            raise config.ConfigError(
                f"there is no [host_keys] {name}: run this where a conductor runs, with its file"
            )
    store = Store.opened(conf)
    upgrades.check(store)
    return conf, store


def _issue(options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store) -> int:
    """Make the broker's user and the key file."""
    host, password = options.host, secrets.token_hex(24)
    keys = host_keys.of_all(store, conf).for_host(
        host, url_as(conf, broker_identities.user_of(host), password)
    )
    store.close()
    path = Path(options.file or f"{host}.key")
    write_secret(path, keys.text())
    instructions = users(conf).make(
        broker_identities.of_host(host, password), address_of(conf).virtual_host or "/"
    )
    say(instructions)
    print(
        f"{path} has the keys of host {host}, generation {keys.generation}. Bring it to the host as [agent] key_file "
        "(host.key in state_dir), readable for kilonova-agent alone, and restart kilonova-agent."
    )
    return 0


def users(conf: cfg.ConfigOpts) -> Users:
    """Who makes users of the broker that is configured."""
    return Management(conf.host_keys.management_url) if conf.host_keys.management_url else ByHand()


def say(left: str) -> None:
    """What an administrator of the broker has still to do."""
    if left:
        print(
            f"[host_keys] management_url is not set; on the broker's machine run:\n{left}",
            file=sys.stderr,
        )
