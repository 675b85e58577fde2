# SPDX-License-Identifier: Apache-2.0
"""The keys of the hosts of one cloud on this machine, as ``kilonova host add`` makes them.

deploy/one_machine/up.py uses this module once the database exists. The steps can be repeated,
because the files follow from the database.
"""

from __future__ import annotations

from functools import partial

from common.security import private_files
from deploy.one_machine.cloud.broker import Broker
from deploy.one_machine.cloud.cloud import Cloud


def make(cloud: Cloud) -> None:
    """Make a key in the database for each host without a key, and write all hosts' key files."""
    from common.rpc.host_credentials import key_file_of
    from common.service import config
    from common.store.engine import Store
    from common.store.hosts import host_keys

    conf = config.load(str(cloud.config()))
    broker = None if cloud.broker_url else Broker.of(cloud)
    store = Store.open(conf)
    try:
        for host in cloud.hosts:
            store.write(partial(host_keys.ensure, host=host))
        keys = host_keys.of_all(store, conf)
        for number, host in enumerate(cloud.hosts, 1):
            url = broker.host_url(host) if broker else ""
            own = key_file_of(keys, host, url, conf.host_keys.broker_addresses)
            private_files.replace(cloud.state_folder(number) / "host.key", own.text())
    finally:
        store.close()
