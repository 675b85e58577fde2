# SPDX-License-Identifier: Apache-2.0
"""``kilonova host add|rotate|remove``: the identity of a host.

The identity consists of the host's keys, the user at the broker, and the token with which a machine
joins (``kilonova join``). The database has the valid generation of a host's keys, the host has the
keys in one file, and the broker has the user. If a command is interrupted, ``rotate`` repairs the
state.
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
from common.rpc.host_credentials import key_file_of
from common.security import broker_identities, broker_names, private_files, tls
from common.security.host_joins import JoinToken
from common.security.host_keys import Purpose, derive
from common.service import config
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.hosts import host_joins, host_keys, host_status, services
from common.store.views import host_contents, host_removal
from deploy.operator.hosts.broker_users import print_instructions, users

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
OVERLAP_SECONDS = 3600
#: The number of servers that an error names.
NAMED = 5


def add(options: argparse.Namespace) -> int:
    """Print a token for ``kilonova join``, or with ``--file`` write the host's first keys.

    Both also create the users at the broker, or without a management API print the commands for
    this.

    Raises:
        Conflict: The host has joined already, or with ``--file`` has keys already.
        ConfigError: The address of the host or of the broker is missing or unusable, the secrets
            of conductors are missing, or the host's name is not permitted.
        Unavailable: The management API does not answer, or refuses the change.
    """
    conf, store = _open(options)
    if options.file:
        store.write(lambda tx: host_keys.add(tx, options.host))
        return _issue(options, conf, store)
    try:
        return _invite(options, conf, store)
    finally:
        store.close()


def _invite(options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store) -> int:
    """Print a new token, which replaces the previous token and keys of the host.

    All checks run before the previous token becomes invalid. Then this function creates the users
    at the broker. Without a management API, this function instead prints the commands and writes
    the passwords to the file HOST-broker.txt.

    Raises:
        Conflict, ConfigError, Unavailable: As ``add``.
    """
    host, password = options.host, secrets.token_hex(24)
    if conf.tls.ca_key_file and not options.address:
        raise errors.ConfigError(
            "[tls] ca_key_file is set, so the host gets a certificate. Give the address for the certificate: kilonova "
            f"host add {host} --address IP"
        )
    join_identity = broker_identities.of_join(host, password)
    at = options.broker or conf.host_keys.broker_addresses
    url = url_as(conf, join_identity.user, password, at=at)
    loopbacks = [
        node.hostname for node in address_of(conf, url).hosts if tls.is_loopback(node.hostname)
    ]
    if loopbacks and not at:
        raise errors.ConfigError(
            f"transport_url names the loopback address {loopbacks[0]}, at which hosts cannot reach the broker. Set "
            f"[host_keys] broker_addresses, or give an address: kilonova host add {host} --broker HOST[:PORT]"
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
    host_identity = broker_identities.of_host(host, keys.broker_password(host, generation))
    virtual_host = address_of(conf).virtual_host or "/"
    instructions = "\n".join(
        filter(
            None, (users(conf).make(node, virtual_host) for node in (host_identity, join_identity))
        )
    )
    if instructions:
        path = Path(f"{host}-broker.txt")
        private_files.replace(
            path,
            "".join(f"{node.user} {node.password}\n" for node in (host_identity, join_identity)),
        )
        print_instructions(
            f"{instructions}\nThe written file is {path}. Remove the file afterwards."
        )
    print(
        f"Run as root on {host}, within an hour: kilonova join TOKEN. The token is valid once. Then run here: kilonova "
        f"host verify {host}",
        file=sys.stderr,
    )
    print(token.text())
    return 0


def rotate(options: argparse.Namespace) -> int:
    """Create new keys of a host, which a running agent fetches, and also write them to a file.

    The host's user at the broker gets a new password. The previous keys stay valid for an hour.
    With ``--now`` they end at once, and the user's connections are closed. Then the operator must
    copy the file to the host. Without a management API, print the commands for the changes at the
    broker.

    Raises:
        NotFound: The host has no keys.
        ConfigError: The secrets of conductors are missing, or the host's name is not permitted.
        Unavailable: The management API does not answer, or refuses a change. The keys are new.
    """
    conf, store = _open(options)
    store.write(
        lambda tx: host_keys.rotate(tx, options.host, 0 if options.now else OVERLAP_SECONDS)
    )
    status = _issue(options, conf, store, is_fetched=not options.now)
    if options.now:
        print_instructions(users(conf).disconnect(broker_names.user_of(options.host)))
    return status


def remove(options: argparse.Namespace) -> int:
    """Remove an empty host from the cloud.

    This deletes the host's keys, token, compute service, resource provider, aggregate memberships
    and users at the broker. Without a management API, print the commands that delete the users.

    Raises:
        Conflict: The host has servers, open migrations, guest records or allocations, or its
            resource provider has children.
        NotFound: The host has no keys and no service. The users at the broker are deleted, or the
            commands are printed, all the same.
        ConfigError: The secrets of conductors are missing, or the host's name is not permitted.
        Unavailable: The management API does not answer, or refuses a change. The host is removed.
    """
    conf, store = _open(options)

    def forget(tx: Connection) -> bool:
        _require_empty(tx, options.host)
        service_rows = services.list_all(tx, options.host, Binary.COMPUTE)
        for row in service_rows:
            host_removal.remove(tx, row, row.uuid)
        host_joins.forget(tx, options.host)
        return host_keys.remove(tx, options.host) or bool(service_rows)

    is_known = store.write(forget)
    store.close()
    broker_users, user = users(conf), broker_names.user_of(options.host)
    join_user = broker_names.user_of_join(options.host)
    instructions = [
        broker_users.remove(user),
        broker_users.disconnect(user),
        broker_users.remove(join_user),
        broker_users.disconnect(join_user),
    ]
    # Before the error, because an earlier command may have been killed before it deleted the users.
    print_instructions("\n".join(filter(None, instructions)))
    if not is_known:
        raise errors.NotFound(
            f"Host {options.host} has no keys and no service. See the list of hosts: kilonova hosts"
        )
    print(f"host {options.host} was removed; conductors refuse its messages from now on")
    return 0


def _require_empty(tx: Connection, host: str) -> None:
    """Check that the host has no servers. An unknown host has no servers.

    Raises:
        Conflict: The host has servers. The text names up to ``NAMED`` servers and the next command.
    """
    states = host_status.host_states(tx, host)
    remaining = host_contents.look(tx, host).servers if states else []
    if not remaining:
        return
    named = ", ".join(f"{server.name} ({server.id})" for server in remaining[:NAMED])
    more = f" and {len(remaining) - NAMED} more" if len(remaining) > NAMED else ""
    way = "drain" if states[host].answers else "evacuate"
    raise errors.Conflict(
        f"Host {host} has {len(remaining)} servers: {named}{more}. First: kilonova host {way} {host}"
    )


def _open(options: argparse.Namespace) -> tuple[cfg.ConfigOpts, Store]:
    if NAME.fullmatch(options.host) is None:
        raise errors.ConfigError(
            f"{options.host!r} is not a host name; use letters, digits, '.', '_' and '-'"
        )
    return open_with_secrets(options.config)


def open_with_secrets(path: str | None) -> tuple[cfg.ConfigOpts, Store]:
    """Return the configuration, and the database, whose version is checked.

    Args:
        path: Path of the configuration file, or None for the default.

    Raises:
        ConfigError: The configuration lacks a secret from which the keys of hosts are derived.
        Unavailable: The database does not answer.
    """
    conf = config.load(path)
    for name in ("command_secret", "query_secret"):
        if not conf.host_keys[name]:
            raise errors.ConfigError(
                f"[host_keys] {name} is not set. Run this command where a conductor runs, with the conductor's "
                "configuration file"
            )
    store = Store.open(conf)
    upgrades.check(store)
    return conf, store


def _issue(
    options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store, is_fetched: bool = False
) -> int:
    """Write the file with the host's newest keys, and create the host's user at the broker.

    An existing user gets the password of the newest keys. Without a management API, print the
    commands for this. Return 0, and close ``store``.

    Args:
        options: The command line.
        conf: The configuration.
        store: The database, which is closed.
        is_fetched: True if a running agent fetches the keys by itself.

    Raises:
        Unavailable: The management API does not answer, or refuses the change. The file is written.
    """
    host, all_keys = options.host, host_keys.of_all(store, conf)
    generation = all_keys.newest(host, Purpose.COMMAND).generation
    password = all_keys.broker_password(host, generation)
    at = conf.host_keys.broker_addresses
    url = url_as(conf, broker_names.user_of(host), password, at=at)
    keys = key_file_of(all_keys, host, url, at)
    store.close()
    path = Path(options.file or f"{host}.key")
    private_files.replace(path, keys.text())
    instructions = users(conf).make(
        broker_identities.of_host(host, password), address_of(conf).virtual_host or "/"
    )
    print_instructions(instructions)
    if is_fetched:
        print(
            f"A running agent of host {host} fetches the new keys within a minute. To see this, run: kilonova host "
            "secrets --wait"
        )
    copy = "Otherwise copy" if is_fetched else "Copy"
    print(
        f"{path} has the keys of host {host}, generation {keys.generation}. {copy} the file to the host as "
        "[agent] key_file (default: host.key in state_dir), readable only for kilonova-agent, and restart the agent."
    )
    return 0
