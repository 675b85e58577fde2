# SPDX-License-Identifier: Apache-2.0
"""The process kilonova-scheduler: configuration, store, broker, heartbeat; the only threads are
here.

Requests are answered one at a time (the library calls from many threads). Apart from its own
heartbeat this process writes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from oslo_config import cfg

from common import access
from common.domain import errors
from common.domain.clock import Clock
from common.domain.errors import ConfigError
from common.domain.models import Explanation, RequestSpec, Selection
from common.domain.service_binaries import Binary
from common.rpc import scheduler as scheduler_rpc
from common.rpc.transport import Transport
from common.security.broker_names import SCHEDULER
from common.service import metrics, reload, service
from common.service.notification_options import NotificationSettings
from common.store.engine import Store
from common.store.hosts import services
from common.store.version import await_version, guarded
from scheduler import filters, weighers
from scheduler.hosts import Hosts, ReadOptions
from scheduler.proposals import Proposals
from scheduler.selection import SelectionOptions

log = logging.getLogger(__name__)
#: Options that are taken over while it runs.
LIVE = (
    "conductor.max_attempts",
    *(
        f"scheduler.{name}"
        for name in (
            "enabled_*",
            "max_*",
            "isolated_*",
            "restrict_*",
            "aggregate_*",
            "image_properties_*",
            "[!i]*_weight_multiplier",
            "io_ops_weight_multiplier",
        )
    ),
)
HEARTBEAT_SECONDS = 10.0  # seconds between two signs of life


class OneAtATime:
    """Lets one request through after the other."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals
        self._turn = threading.Lock()

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """See ``Proposals.select``."""
        began = time.monotonic()
        with self._turn:
            selections = self._proposals.select(specs, fresh)
        metrics.SELECT_SECONDS.observe(time.monotonic() - began)
        for selection in selections:
            metrics.SELECTIONS.add("hosts" if selection.hosts else "none")
        return selections

    def choose_by(self, wanted: SelectionOptions) -> None:
        """From the next request on."""
        with self._turn:
            self._proposals.options = wanted

    def explain(self, spec: RequestSpec) -> Explanation:
        """See ``Proposals.explain``."""
        with self._turn:
            return self._proposals.explain(spec)


def options(conf: cfg.ConfigOpts) -> SelectionOptions:
    """What the configuration says about choosing. Raises ConfigError: a filter or weigher is
    unknown."""
    try:
        metrics = weighers.pairs("[metrics] weight_setting", conf.metrics.weight_setting)
        return SelectionOptions(
            filters.load(conf),
            weighers.load(conf),
            conf.conductor.max_attempts,
            tuple(metrics) if conf.metrics.required else (),
        )
    except (filters.UnknownFilter, weighers.UnknownWeigher) as problem:
        raise ConfigError(str(problem)) from problem


def read_options(conf: cfg.ConfigOpts) -> ReadOptions:
    """What of the hosts somebody looks at, as far as it is not read anyway."""
    return ReadOptions(
        conf.scheduler.default_availability_zone,
        conf.scheduler.build_failure_pause,
        metrics=bool(conf.metrics.weight_setting),
        images=bool(
            conf.scheduler.image_props_weight_multiplier
            or conf.scheduler.image_props_weight_setting
        ),
    )


def _take_over(answering: OneAtATime, reading: ReadOptions, conf: cfg.ConfigOpts) -> None:
    """Choose by new options from now on. Raises ConfigError: a name is unknown, or something else
    has to be read of the hosts."""
    wanted = options(conf)
    if read_options(conf) != reading:
        raise ConfigError("what is read of hosts has changed too, which takes a restart")
    answering.choose_by(wanted)


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open the store and the broker, answer requests; returns what closes them."""
    wanted = options(conf)
    access.check(conf, access.DATABASE, access.BROKER)
    name, name_file = service.own_name(conf.state_dir, "scheduler", conf.host)
    store = guarded(Store.opened(conf, notifications=NotificationSettings.of(conf)))
    await_version(store)
    transport = Transport(conf, role=SCHEDULER)
    store.write(lambda tx: services.enrol(tx, conf.host, Binary.SCHEDULER))
    reading = read_options(conf)
    answering = OneAtATime(Proposals(Hosts(store, Clock(), reading), wanted))
    reload.takes(*LIVE, then=lambda conf: _take_over(answering, reading, conf))
    scheduler_rpc.serve(transport, name, answering)
    stop = threading.Event()
    threading.Thread(
        target=_beat, args=(store, conf.host, stop), name="heartbeat", daemon=True
    ).start()

    def close() -> None:
        stop.set()
        transport.close()
        store.close()
        name_file.close()

    return close


def _beat(store: Store, host: str, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            store.write(lambda tx: services.beat(tx, [host], Binary.SCHEDULER))
        except errors.Unavailable as problem:
            log.warning("no heartbeat: %s; trying again", problem)
        stop.wait(HEARTBEAT_SECONDS)


def main() -> None:
    """The console script kilonova-scheduler."""
    service.run("scheduler", service.start("scheduler"), open_up)


if __name__ == "__main__":
    main()
