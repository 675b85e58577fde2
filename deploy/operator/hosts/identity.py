# SPDX-License-Identifier: Apache-2.0
"""``kilonova host add|rotate|remove``: who may speak as a host: its keys, and its user at the
broker, and the token with which a machine becomes it (``kilonova join``).

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

from common.domain import errors
from common.domain.service_binaries import Binary
from common.rpc.broker import address_of, url_as
from common.security import broker_identities, broker_names, private_files, tls
from common.security.host_joins import JoinToken
from common.security.host_keys import Purpose, derive
from common.service import config
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_joins, host_keys, host_status, services
from common.store.views import host_contents, host_removal
from deploy.operator.hosts.broker_users import say, users

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
OVERLAP_SECONDS = 3600
NAMED = 5  #: servers, in a refusal


def add(options: argparse.Namespace) -> int:
    """Let a host join: print a token for ``kilonova join``; or with --file give it its first
    keys."""
    conf, store = _opened(options)
    if options.file:
        store.write(lambda tx: host_keys.add(tx, options.host))
        return _issue(options, conf, store)
    try:
        return _invite(options, conf, store)
    finally:
        store.close()


def _invite(options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store) -> int:
    """Everything that can be refused is looked at before the token before this one ends."""
    host, password = options.host, secrets.token_hex(24)
    if conf.tls.ca_key_file and not options.address:
        raise errors.ConfigError(
            f"hosts that join here get a certificate: say for which address, kilonova host add {host} --address IP"
        )
    joins = broker_identities.of_join(host, password)
    url = url_as(conf, joins.user, password, at=options.broker)
    near = [one.hostname for one in address_of(conf, url).hosts if tls.is_loopback(one.hostname)]
    if near and not options.broker:
        raise errors.ConfigError(
            f"transport_url says {near[0]}, which from a host is that host: say where hosts reach the broker, "
            f"kilonova host add {host} --broker HOST[:PORT]"
        )
    authority = Path(conf.tls.ca_file).read_text() if tls.of(conf) else ""
    keys = host_keys.of_all(store, conf)
    generation = store.write(lambda tx: host_joins.invite(tx, host, options.address or ""))
    token = JoinToken(
        host,
        generation,
        derive(conf.host_keys.command_secret, host, generation, Purpose.JOIN).secret.hex(),
        url,
        authority,
        bool(conf.tls.allow_plain_text),
    )
    own = broker_identities.of_host(host, keys.broker_password(host, generation))
    virtual_host = address_of(conf).virtual_host or "/"
    left = "\n".join(filter(None, (users(conf).make(one, virtual_host) for one in (own, joins))))
    if left:
        path = Path(f"{host}-broker.txt")
        private_files.replace(path, "".join(f"{one.user} {one.password}\n" for one in (own, joins)))
        say(f"{left}\nThe written file is {path}: remove it then.")
    print(
        f"Within an hour, once, as root on {host}: kilonova join TOKEN. Then here: kilonova host prove {host}",
        file=sys.stderr,
    )
    print(token.text())
    return 0


def rotate(options: argparse.Namespace) -> int:
    """Give a host new keys; the ones before count for an hour still, or with ``--now`` no more."""
    conf, store = _opened(options)
    store.write(
        lambda tx: host_keys.rotate(tx, options.host, 0 if options.now else OVERLAP_SECONDS)
    )
    status = _issue(options, conf, store)
    if options.now:
        say(users(conf).disconnect(broker_names.user_of(options.host)))
    return status


def remove(options: argparse.Namespace) -> int:
    """Take away all that is known of a host, when nothing is on it: keys, token, service, provider,
    memberships, users of the broker."""
    conf, store = _opened(options)

    def forget(tx: Connection) -> bool:
        _require_empty(tx, options.host)
        found = services.list_all(tx, options.host, Binary.COMPUTE)
        for row in found:
            host_removal.remove(tx, row, row.uuid)
        host_joins.forget(tx, options.host)
        return host_keys.remove(tx, options.host) or bool(found)

    is_known = store.write(forget)
    store.close()
    known, own = users(conf), broker_names.user_of(options.host)
    joins = broker_names.user_of_join(options.host)
    left = [known.remove(own), known.disconnect(own), known.remove(joins), known.disconnect(joins)]
    if not is_known:  # its users were perhaps left by a command that was killed
        raise errors.NotFound(
            f"Host {options.host} has no keys: kilonova hosts lists those that are known."
        )
    say("\n".join(filter(None, left)))
    print(f"host {options.host} is not heard any more")
    return 0


def _require_empty(tx: Connection, host: str) -> None:
    """Raises Conflict, which names the servers there and what takes them away."""
    states = host_status.host_states(tx, host)
    there = host_contents.look(tx, host).servers if states else []
    if not there:
        return
    named = ", ".join(f"{one.name} ({one.id})" for one in there[:NAMED])
    more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
    way = "drain" if states[host].answers else "evacuate"
    raise errors.Conflict(
        f"Host {host} has {len(there)} servers: {named}{more}. First: kilonova host {way} {host}"
    )


def _opened(options: argparse.Namespace) -> tuple[cfg.ConfigOpts, Store]:
    conf = config.load(options.config)
    if NAME.fullmatch(options.host) is None:
        raise errors.ConfigError(
            f"{options.host!r} is no name of a host: letters, digits, '.', '_' and '-'"
        )
    for name in ("command_secret", "query_secret"):
        if not conf.host_keys[name]:
            raise errors.ConfigError(
                f"there is no [host_keys] {name}: run this where a conductor runs, with its file"
            )
    store = Store.opened(conf)
    upgrades.check(store)
    return conf, store


def _issue(options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store) -> int:
    """Make the broker's user and the key file."""
    host, made = options.host, host_keys.of_all(store, conf)
    generation = made.newest(host, Purpose.COMMAND).generation
    password = made.broker_password(host, generation)
    keys = made.for_host(host, url_as(conf, broker_names.user_of(host), password), generation)
    store.close()
    path = Path(options.file or f"{host}.key")
    private_files.replace(path, keys.text())
    instructions = users(conf).make(
        broker_identities.of_host(host, password), address_of(conf).virtual_host or "/"
    )
    say(instructions)
    print(
        f"{path} has the keys of host {host}, generation {keys.generation}. Bring it to the host as [agent] key_file "
        "(host.key in state_dir), readable for kilonova-agent alone, and restart kilonova-agent."
    )
    return 0
