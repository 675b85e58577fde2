# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-scheduler: configuration, store, broker, heartbeat; the only threads are here.

Requests are answered one at a time (the library calls from many threads). Apart from its own heartbeat this
process writes nothing.
"""
from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

from oslo_config import cfg

from common import errors, service
from common.clock import Clock
from common.models import RequestSpec, Selection
from common.rpc import scheduler as scheduler_rpc
from common.rpc.transport import Transport
from common.store import services
from common.store.engine import Store
from scheduler.filters import FILTERS
from scheduler.hosts import Hosts
from scheduler.proposals import Proposals
from scheduler.select import Options
from scheduler.weighers import WEIGHERS

log = logging.getLogger(__name__)
BEAT = 10.0      # seconds between two signs of life


class OneAtATime:
    """Lets one request through after the other."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals
        self._turn = threading.Lock()

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """See ``Proposals.select``."""
        with self._turn:
            return self._proposals.select(specs, fresh)


def options(conf: cfg.ConfigOpts) -> Options:
    """What the configuration says about choosing; ends the process when a filter is unknown."""
    unknown = [name for name in conf.scheduler.enabled_filters if name not in FILTERS]
    if unknown:
        sys.exit(f"kilonova-scheduler: [scheduler] enabled_filters: unknown {', '.join(unknown)}; "
                 f"allowed are {', '.join(FILTERS)}")
    return Options(tuple(conf.scheduler.enabled_filters), {name: conf.scheduler[name] for name in WEIGHERS},
                   conf.conductor.max_attempts)


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open the store and the broker, answer requests; returns what closes them."""
    wanted = options(conf)
    name, name_file = service.own_name(conf.state_dir, "scheduler", conf.host)
    store, transport = Store(conf.database.url), Transport(conf)
    store.write(lambda tx: services.enrol(tx, conf.host, services.SCHEDULER))
    hosts = Hosts(store, Clock(), conf.scheduler.default_availability_zone)
    scheduler_rpc.serve(transport, name, OneAtATime(Proposals(hosts, wanted)))
    stop = threading.Event()
    threading.Thread(target=_beat, args=(store, conf.host, stop), name="heartbeat", daemon=True).start()

    def close() -> None:
        stop.set()
        transport.close()
        store.close()
        name_file.close()
    return close


def _beat(store: Store, host: str, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            store.write(lambda tx: services.beat(tx, [host], services.SCHEDULER))
        except errors.Unavailable as problem:
            log.warning("no heartbeat: %s; trying again", problem)
        stop.wait(BEAT)


def main() -> None:
    """The console script kilonova-scheduler."""
    service.run(service.start("scheduler"), open_up)


if __name__ == "__main__":
    main()
