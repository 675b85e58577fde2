# SPDX-License-Identifier: Apache-2.0
"""A store in memory with hosts, and snapshots without a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import sqlalchemy as sa
from oslo_config import cfg

from common.domain.clock import SECOND
from common.service import config
from common.store import schema
from common.store.engine import Store
from scheduler import service
from scheduler.columns import seed
from scheduler.selection import SelectionOptions
from scheduler.snapshot import Numbers, Snapshot, Stock
from tests.schemas import upgrade


@dataclass
class FakeClock:
    """A clock that the test moves. The database uses the same clock."""

    seconds: float = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def micros(self) -> int:
        return int(self.seconds * SECOND)


@dataclass
class Cloud:
    """Hosts in a store with a database."""

    store: Store
    clock: FakeClock
    ids: dict[str, int] = field(default_factory=dict)

    def host(
        self,
        name: str,
        vcpus: int = 4,
        memory_mb: int = 4096,
        disk_gb: int = 40,
        *,
        up: bool = True,
        disabled: bool = False,
        forced_down: bool = False,
        reserved: int = 0,
        ratio: float = 1.0,
    ) -> None:
        """Add a host with its provider, inventories, service and heartbeat."""
        now = self.clock.micros()
        with self.store.begin() as tx:
            key = tx.execute(
                sa.insert(schema.providers).values(
                    uuid=name, name=name, host=name, root_uuid=name, created_at=now, changed_at=now
                )
            ).inserted_primary_key[0]
            for resource_class, total in {
                "VCPU": vcpus,
                "MEMORY_MB": memory_mb,
                "DISK_GB": disk_gb,
            }.items():
                tx.execute(
                    sa.insert(schema.inventories).values(
                        provider_id=key,
                        resource_class=resource_class,
                        total=total,
                        max_unit=total,
                        reserved=reserved if resource_class == "MEMORY_MB" else 0,
                        allocation_ratio=ratio if resource_class == "VCPU" else 1.0,
                    )
                )
            tx.execute(
                sa.insert(schema.services).values(
                    uuid=name,
                    host=name,
                    binary="nova-compute",
                    disabled=disabled,
                    forced_down=forced_down,
                    created_at=now,
                    updated_at=now,
                )
            )
            tx.execute(
                sa.insert(schema.heartbeats).values(
                    host=name, binary="nova-compute", seen_at=now, up=up
                )
            )
        self.ids[name] = key

    def claim(self, host: str, server: str, **resources: int) -> None:
        """Insert allocations as a conductor does.

        The provider's generation and time are updated.
        """
        with self.store.begin() as tx:
            for resource_class, used in resources.items():
                tx.execute(
                    sa.insert(schema.allocations).values(
                        provider_id=self.ids[host],
                        consumer_id=server,
                        resource_class=resource_class,
                        used=used,
                    )
                )
            tx.execute(
                sa.update(schema.providers)
                .where(schema.providers.c.host == host)
                .values(
                    generation=schema.providers.c.generation + 1, changed_at=self.clock.micros()
                )
            )

    def zone(self, name: str, *hosts: str) -> None:
        """Add the hosts to an aggregate with an availability zone."""
        with self.store.begin() as tx:
            key = tx.execute(
                sa.insert(schema.aggregates).values(
                    uuid=name,
                    name=name,
                    meta={"availability_zone": name},
                    created_at=self.clock.micros(),
                )
            ).inserted_primary_key[0]
            tx.execute(
                sa.insert(schema.aggregate_hosts),
                [{"aggregate_id": key, "host": host} for host in hosts],
            )


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    clock = FakeClock()
    store = Store("sqlite:///:memory:", time=clock.micros)
    upgrade(store)
    yield Cloud(store, clock)
    store.close()


def columns(size: int, vcpus: int = 8, memory_mb: int = 8192, disk_gb: int = 80) -> Snapshot:
    """Return a snapshot of this number of equal hosts, which are up and in zone nova.

    Their names are host0 and so on.
    """
    names = [f"host{number}" for number in range(size)]
    yes, no = np.ones(size, np.bool_), np.zeros(size, np.bool_)

    def zeros() -> Numbers:
        return np.zeros(size, np.int64)

    def stock(total: int) -> Stock:
        return Stock(
            np.full(size, total),
            np.ones(size, np.int64),
            np.full(size, total),
            np.ones(size, np.int64),
        )

    return Snapshot(
        names,
        {name: row for row, name in enumerate(names)},
        np.array([seed(name) for name in names], np.uint64),
        yes,
        no,
        no.copy(),
        yes.copy(),
        np.zeros(size, np.int64),
        {"nova": 0},
        {"VCPU": stock(vcpus), "MEMORY_MB": stock(memory_mb), "DISK_GB": stock(disk_gb)},
        servers=zeros(),
        working=zeros(),
        failures=zeros(),
        waits=zeros(),
        versions=zeros(),
        kinds=zeros(),
        facts=[{}],
        devices=zeros(),
    )


def conf(**values: object) -> cfg.ConfigOpts:
    """Return a configuration with these values.

    A name is an option of [scheduler], for example ``ram_weight_multiplier``, or contains the
    section, for example ``metrics__required``.
    """
    configuration = cfg.ConfigOpts()
    config.register(configuration)
    configuration([], default_config_files=[], default_config_dirs=[])
    for name, value in values.items():
        group, _, option = name.rpartition("__")
        configuration.set_override(option, value, group or "scheduler")
    return configuration


def options(**values: object) -> SelectionOptions:
    """Return the scheduler's options for this configuration.

    ``hosts`` replaces [conductor] max_attempts.
    """
    hosts = values.pop("hosts", 3)
    return service.options(conf(**values, conductor__max_attempts=hosts))


@pytest.fixture
def make_columns() -> Callable[..., Snapshot]:
    return columns
