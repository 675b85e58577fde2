# SPDX-License-Identifier: Apache-2.0
"""``kilonova broker add|remove ROLE``: the identity of API, console service, scheduler or
conductor at the broker.

Repeatable: ``add`` gives a role that is known another password; connections that are open go on.
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
from deploy.operator.hosts.broker_users import say, users


def add(options: argparse.Namespace) -> int:
    """Make a role's user, and write what its processes have to know of it."""
    conf = config.load(options.config)
    identity = _identity(conf, options.role, secrets.token_hex(24))
    path = Path(options.file or f"{options.role}-broker.conf")
    private_files.replace(
        path, f"[DEFAULT]\ntransport_url = {url_as(conf, identity.user, identity.password)}\n"
    )
    say(users(conf).make(identity, address_of(conf).virtual_host or "/"))
    print(
        f"{path} has the transport_url of {identity.user}. Put it into the configuration of every {options.role} "
        "process in place of the one that is there, and restart them."
    )
    return 0


def remove(options: argparse.Namespace) -> int:
    """Take a role's user away, with its connections."""
    conf, user = config.load(options.config), broker_names.user_of_role(options.role)
    known = users(conf)
    for left in (known.remove(user), known.disconnect(user)):
        say(left)
    print(f"{user} is not known at the broker any more")
    return 0


def _identity(conf: cfg.ConfigOpts, role: str, password: str) -> Identity:
    """With what this cloud's configuration says of notifications."""
    exchange, topics = (
        own_exchange(conf),
        ["notifications", *conf.notifications.versioned_notifications_topics],
    )
    names = {"calls": exchange, "notifications": exchange} if exchange else {}
    return broker_identities.of_role(role, password, topics=topics, **names)
