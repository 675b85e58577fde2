# SPDX-License-Identifier: Apache-2.0
"""``kilonova broker restore``: create or update all users at the broker with today's rights.

For a broker that has lost its data, for a new broker, and after an upgrade that changes rights.
Passwords stay, so no host and no process needs a new file. The users of hosts follow from the
database and ``[host_keys] command_secret``, those of the control plane from ``transport_url``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from oslo_config import cfg

from common.domain.errors import ConfigError
from common.rpc.broker import BrokerAddress, address_of
from common.security import broker_identities, broker_names, private_files
from common.security.broker_identities import Identity
from common.security.host_keys import Purpose
from common.service import config
from common.store import upgrades
from common.store.engine import Store
from common.store.hosts import host_keys
from deploy.operator.hosts.broker_roles import role_identity
from deploy.operator.hosts.broker_users import Management

#: The first line of a configuration file that ./deploy/up writes begins so.
MADE_BY_UP = "# Made by deploy/up"


def restore(options: argparse.Namespace) -> int:
    """Create all users at the broker, and reset passwords and rights of existing users.

    Without a management API, write a file of definitions and print the command that imports it.
    Users of other roles are restored if ``--role-file`` names their configurations. Join tokens
    cannot be restored: a machine that has not joined yet needs a new one.

    Raises:
        ConfigError: The secret of conductors is missing, a configuration is not valid, or
            ./deploy/up made the cloud. The hosts of such a cloud have other passwords.
        Unavailable: The database or the management API does not answer, or refuses the change.
    """
    # ``config.load`` replaces the configuration of this process, so the command's own comes last.
    roles = [(path, address_of(config.load(path))) for path in options.role_file or ()]
    conf = config.load(options.config)
    if not conf.host_keys.command_secret:
        raise ConfigError(
            "[host_keys] command_secret is not set. Run this command where a conductor runs, with "
            "the conductor's configuration file"
        )
    if is_made_by_up(conf):
        raise ConfigError(
            "./deploy/up made this cloud, and the passwords of its hosts at the broker are others than this command "
            "writes. The cloud's RabbitMQ creates all users at each start: run ./deploy/down and ./deploy/up"
        )
    store = Store.open(conf)
    upgrades.check(store)
    hosts, others = identities_of_hosts(store, conf), identities_of_processes(conf, roles)
    store.close()
    virtual_host = address_of(conf).virtual_host or "/"
    definitions = broker_identities.definitions([*others, *hosts], virtual_host)
    if conf.host_keys.management_url:
        Management(conf.host_keys.management_url).load(definitions)
        print(f"{len(hosts)} users of hosts are restored, and {_names(others)}")
    else:
        path = Path(options.file or "broker-definitions.json")
        private_files.replace(path, json.dumps(definitions))
        print(
            f"{path} has {len(hosts)} users of hosts, and {_names(others)}. Run on the broker's "
            "machine, and remove the file afterwards:\n"
            f"  rabbitmqctl import_definitions < {shlex.quote(str(path.resolve()))}"
        )
    print(
        "Users of roles with a transport_url of their own: name their configurations with "
        "--role-file. Machines that have not joined yet: kilonova host add HOST",
        file=sys.stderr,
    )
    return 0


def is_made_by_up(conf: cfg.ConfigOpts) -> bool:
    """Return True if ./deploy/up made the cloud of this configuration."""
    return any(Path(path).read_text().startswith(MADE_BY_UP) for path in conf.config_file)


def identities_of_hosts(store: Store, conf: cfg.ConfigOpts) -> list[Identity]:
    """Return the users of all hosts at the broker."""
    keys = host_keys.of_all(store, conf)
    return [
        broker_identities.of_host(
            host, keys.broker_password(host, keys.newest(host, Purpose.COMMAND).generation)
        )
        for host in sorted(keys.hosts())
    ]


def identities_of_processes(
    conf: cfg.ConfigOpts, role_addresses: Iterable[tuple[str, BrokerAddress]] = ()
) -> list[Identity]:
    """Return the users of the processes of the control plane, without the administrator.

    The administrator is the user of the management API. A change would take away its tag.

    Raises:
        ConfigError: The user in the configuration of a role is not a user of a role.
    """
    administrator = unquote(urlsplit(conf.host_keys.management_url).username or "")
    return [
        identity
        for identity in _of_processes(conf, role_addresses)
        if identity.user != administrator
    ]


def _of_processes(
    conf: cfg.ConfigOpts, role_addresses: Iterable[tuple[str, BrokerAddress]]
) -> Iterator[Identity]:
    """Yield the users of the processes of the control plane, each once.

    A user of a role has the rights of the role. Any other user of ``conf`` has all rights.

    Args:
        conf: The configuration of this command.
        role_addresses: Paths of configurations of roles, and the broker's address in each.

    Raises:
        ConfigError: The user in the configuration of a role is not a user of a role.
    """
    roles = {broker_names.user_of_role(role): role for role in broker_names.ROLES}
    seen = set()
    for path, address in [("", address_of(conf)), *role_addresses]:
        for node in address.hosts:
            if path and node.username not in roles:
                raise ConfigError(
                    f"{path}: {node.username} in transport_url is not the user of a role: "
                    f"{', '.join(roles)}"
                )
            if node.username in seen:
                continue
            seen.add(node.username)
            if node.username in roles:
                yield role_identity(conf, roles[node.username], node.password)
            else:
                yield broker_identities.of_operator(node.username, node.password)


def _names(identities: Iterable[Identity]) -> str:
    return ", ".join(identity.user for identity in identities) or "no user of a process"
