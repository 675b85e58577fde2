# SPDX-License-Identifier: Apache-2.0
"""The process ``kilonova-scheduler``.

``open_up`` connects the store and the broker, starts the heartbeat thread, and answers requests of
conductors and operators. The RPC library calls from many threads, and ``OneAtATime`` serializes the
calls. Apart from its own heartbeat, this process only reads the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from oslo_config import cfg

from common import __version__, access
from common.domain import errors
from common.domain.clock import Clock
from common.domain.errors import ConfigError
from common.domain.models import Explanation, RequestSpec, Selection
from common.domain.service_binaries import Binary
from common.rpc import scheduler as scheduler_rpc
from common.rpc.transport import Transport
from common.security.broker_names import SCHEDULER
from common.service import metrics, reload, service
from common.service.log import get_logger
from common.service.notification_options import NotificationSettings
from common.store.engine import Store
from common.store.hosts import services
from common.store.version import await_version, guard
from scheduler import filters, weighers
from scheduler.hosts import Hosts, ReadOptions
from scheduler.proposals import Proposals
from scheduler.selection import SelectionOptions

log = get_logger(__name__)
#: Options whose changes apply at a reload of the configuration, without a restart, unless they need
#: other data about hosts (``_apply_options``).
LIVE = (
    "conductor.max_attempts",
    "metrics.*",
    *(
        f"scheduler.{name}"
        for name in (
            "build_failure_limit",
            "enabled_*",
            "max_*",
            "isolated_*",
            "restrict_*",
            "aggregate_*",
            "image_prop*",
            "*_weight_multiplier",
        )
    ),
)
HEARTBEAT_SECONDS = 10.0


class OneAtATime:
    """Serializes the calls to ``Proposals``, which is not thread-safe."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals
        self._turn = threading.Lock()

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Return the result of ``Proposals.select``, one call at a time.

        The duration, including the wait for other calls, and the results are recorded as metrics.
        """
        began = time.monotonic()
        with self._turn:
            selections = self._proposals.select(specs, fresh)
        metrics.SELECT_SECONDS.observe(time.monotonic() - began)
        for selection in selections:
            metrics.SELECTIONS.add("hosts" if selection.hosts else "none")
        return selections

    def set_options(self, new_options: SelectionOptions) -> None:
        """Use these options from the next request on."""
        with self._turn:
            self._proposals.options = new_options

    def explain(self, spec: RequestSpec) -> Explanation:
        """Return the result of ``Proposals.explain``, one call at a time."""
        with self._turn:
            return self._proposals.explain(spec)


def options(conf: cfg.ConfigOpts) -> SelectionOptions:
    """Build the scheduler's selection options from the configuration.

    Raises:
        ConfigError: A filter or weigher is unknown or cannot be created, or a ratio is not a finite
            number.
    """
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
    """Return the ``ReadOptions`` that the options of filters and weighers require.

    The options count even if the weigher is not enabled.
    """
    return ReadOptions(
        conf.scheduler.default_availability_zone,
        conf.scheduler.build_failure_pause,
        metrics=bool(conf.metrics.weight_setting),
        images=bool(
            conf.scheduler.image_props_weight_multiplier
            or conf.scheduler.image_props_weight_setting
        ),
    )


def _apply_options(proposals: OneAtATime, current: ReadOptions, conf: cfg.ConfigOpts) -> None:
    """Apply the changed options to the running scheduler.

    Args:
        proposals: The running scheduler.
        current: The ``ReadOptions`` since the start of the process.
        conf: The changed configuration.

    Raises:
        ConfigError: The options are invalid, or the change needs other data about hosts, which is
            only read after a restart. Then the scheduler keeps its options.
    """
    new_options = options(conf)
    if read_options(conf) != current:
        raise ConfigError(
            "the changed [metrics] or [scheduler] options need other data about hosts: restart "
            "kilonova-scheduler"
        )
    proposals.set_options(new_options)


def open_up(conf: cfg.ConfigOpts) -> Callable[[], None]:
    """Open the store and the broker, start the heartbeat, and start to answer requests.

    Returns:
        A function that closes all connections and stops the heartbeat.

    Raises:
        ConfigError: The options are invalid, or the database or broker refuses the login.
    """
    selection_options = options(conf)
    access.check(conf, access.DATABASE, access.BROKER)
    name, name_file = service.own_name(conf.state_dir, "scheduler", conf.host)
    store = guard(Store.open(conf, notifications=NotificationSettings.of(conf)))
    await_version(store)
    transport = Transport(conf, role=SCHEDULER)
    store.write(lambda tx: services.enrol(tx, conf.host, Binary.SCHEDULER, __version__))
    host_data = read_options(conf)
    proposals = OneAtATime(Proposals(Hosts(store, Clock(), host_data), selection_options))
    reload.takes(*LIVE, then=lambda conf: _apply_options(proposals, host_data, conf))
    scheduler_rpc.serve(transport, name, proposals)
    stop = threading.Event()
    threading.Thread(
        target=_send_heartbeats, args=(store, conf.host, stop), name="heartbeat", daemon=True
    ).start()

    def close() -> None:
        stop.set()
        transport.close()
        store.close()
        name_file.close()

    return close


def _send_heartbeats(store: Store, host: str, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            store.write(lambda tx: services.beat(tx, [host], Binary.SCHEDULER))
        except errors.Unavailable as problem:
            log.warning(
                "the heartbeat of this scheduler was not stored, and is repeated", problem=problem
            )
        stop.wait(HEARTBEAT_SECONDS)


def main() -> None:
    """Run the console script ``kilonova-scheduler``."""
    service.run("scheduler", service.start("scheduler"), open_up)


if __name__ == "__main__":
    main()
