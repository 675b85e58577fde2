# SPDX-License-Identifier: Apache-2.0
"""The keys of the hosts of one cloud on this machine: what ``kilonova host add`` does for an
operator.

Used by deploy/one_machine/up.py once the database is there. Repeatable: a file follows from what
the database says counts.
"""

from __future__ import annotations

from functools import partial

from common.security import private_files
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import Cloud


def make(cloud: Cloud) -> None:
    """Give each host a key, and its key file."""
    from common.service import config
    from common.store.engine import Store
    from common.store.hosts import host_keys

    conf = config.load(str(cloud.config()))
    broker = None if cloud.broker_url else Broker.of(cloud)
    store = Store.opened(conf)
    try:
        for host in cloud.hosts:
            store.write(partial(host_keys.ensure, host=host))
        keys = host_keys.of_all(store, conf)
        for number, host in enumerate(cloud.hosts, 1):
            own = keys.for_host(host, broker.host_url(host) if broker else "")
            private_files.replace(cloud.state_folder(number) / "host.key", own.text())
    finally:
        store.close()
