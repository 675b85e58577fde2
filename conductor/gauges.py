# SPDX-License-Identifier: Apache-2.0
"""Metrics that conductors read from the database at each scrape by Prometheus.

Every conductor reports the same values, so queries must use max and not sum. The database is read
at most once in ``KEEP_SECONDS``. If the database does not answer, these metrics are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from common.domain import errors
from common.service.log import get_logger
from common.service.metrics import PREFIX
from common.store.engine import Store
from common.store.views import gauges

if TYPE_CHECKING:
    from prometheus_client import Metric

log = get_logger(__name__)
KEEP_SECONDS = 5.0


class DatabaseGauges:
    """A collector of prometheus-client, which yields the metrics of the database."""

    def __init__(self, store: Store, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store, self._monotonic = store, monotonic
        self._read: list[gauges.Sample] = []
        self._fresh_until = float("-inf")

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registration does not read the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the database, at most ``KEEP_SECONDS`` old.

        If the database does not answer, the metrics have no values.
        """
        from prometheus_client.core import GaugeMetricFamily

        families = {
            name: GaugeMetricFamily(PREFIX + name, description, labels=labels)
            for name, (description, labels) in gauges.GAUGES.items()
        }
        for name, labels, value in self._samples():
            families[name].add_metric(labels, value)
        yield from families.values()

    def _samples(self) -> list[gauges.Sample]:
        if self._monotonic() >= self._fresh_until:
            try:
                self._read = self._store.read(lambda tx: list(gauges.read(tx)))
            except errors.Unavailable as problem:
                log.warning("metrics of the database are missing", problem=problem)
                return []
            self._fresh_until = self._monotonic() + KEEP_SECONDS
        return self._read
