# SPDX-License-Identifier: Apache-2.0
"""``kilonova broker add|remove ROLE``: users of API, console service, scheduler and conductor.

``add`` may be repeated. An existing role gets a new password, and open connections continue.
"""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from oslo_config import cfg

from common.rpc.broker import address_of, own_exchange, url_as
from common.security import broker_identities, broker_names, private_files
from common.security.broker_identities import Identity
from common.service import config
from deploy.operator.hosts.broker_users import print_instructions, users


def add(options: argparse.Namespace) -> int:
    """Write a file with a new ``transport_url`` for a role, and create the user at the broker.

    An existing user gets a new password. Without a management API, print the commands that create
    the user.

    Raises:
        Unavailable: The management API does not answer, or refuses the change. The file is written.
    """
    conf = config.load(options.config)
    identity = role_identity(conf, options.role, secrets.token_hex(24))
    path = Path(options.file or f"{options.role}-broker.conf")
    private_files.replace(
        path, f"[DEFAULT]\ntransport_url = {url_as(conf, identity.user, identity.password)}\n"
    )
    print_instructions(users(conf).make(identity, address_of(conf).virtual_host or "/"))
    print(
        f"{path} has the transport_url of {identity.user}. Replace transport_url with it in the configuration of "
        f"every {options.role} process, and restart these processes."
    )
    return 0


def remove(options: argparse.Namespace) -> int:
    """Delete a role's user at the broker, and close the user's connections.

    Without a management API, print the commands for this.

    Raises:
        Unavailable: The management API does not answer, or refuses the change.
    """
    conf, user = config.load(options.config), broker_names.user_of_role(options.role)
    broker_users = users(conf)
    for instructions in (broker_users.remove(user), broker_users.disconnect(user)):
        print_instructions(instructions)
    print(f"user {user} is deleted at the broker, after the commands above if there are any")
    return 0


def role_identity(conf: cfg.ConfigOpts, role: str, password: str) -> Identity:
    """Return the role's identity at the broker, for the exchange and notification topics."""
    exchange, topics = (
        own_exchange(conf),
        ["notifications", *conf.notifications.versioned_notifications_topics],
    )
    names = {"calls": exchange, "notifications": exchange} if exchange else {}
    return broker_identities.of_role(role, password, topics=topics, **names)
