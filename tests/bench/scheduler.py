# SPDX-License-Identifier: Apache-2.0
"""Figures of the scheduler, printed with the machine: ``python -m tests.bench.scheduler``.

Decisions use generated columns of many hosts, with ten filters and six weighers. Reads use a SQLite
database with hosts, inventories, traits and allocations. The benchmark asserts no limits, because
machines are noisy. Compare figures of one run.
"""

from __future__ import annotations

import gc
import platform
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
from oslo_config import cfg

from common.domain import hardware
from common.domain.clock import SECOND, Clock
from common.domain.models import Flavor, ImageRef, RequestSpec
from common.domain.request_spec import of
from common.service import config
from common.store import schema
from common.store.engine import Store
from scheduler import service
from scheduler.columns import seed
from scheduler.hosts import Hosts
from scheduler.selection import SelectionOptions, explain, select
from scheduler.snapshot import Aggregate, Numbers, Snapshot, Stock

SIZES = (1_000, 10_000, 100_000)
FILTERS = [
    "ComputeFilter",
    "AvailabilityZoneFilter",
    "ComputeCapabilitiesFilter",
    "ImagePropertiesFilter",
    "AggregateInstanceExtraSpecsFilter",
    "AggregateMultiTenancyIsolation",
    "NumInstancesFilter",
    "IoOpsFilter",
    "SameHostFilter",
    "DifferentHostFilter",
]
WEIGHERS = [
    "RAMWeigher",
    "CPUWeigher",
    "DiskWeigher",
    "IoOpsWeigher",
    "BuildFailureWeigher",
    "HypervisorVersionWeigher",
]
FLAVOR = Flavor(
    "1",
    "m1.small",
    2,
    2048,
    20,
    extra_specs={
        "capabilities:hypervisor_type": "QEMU",
        "aggregate_instance_extra_specs:ssd": "true",
    },
)
IMAGE = ImageRef("i", properties={"hw_architecture": "x86_64", "hw_disk_bus": "virtio"})
FACTS = [
    {
        "hypervisor_type": "QEMU",
        "hypervisor_version": 7002000 + kind,
        "cpu_info": {
            "arch": "x86_64",
            "features": [f"feature{number}" for number in range(kind, kind + 80)],
        },
        "supported_instances": [["x86_64", "qemu", "hvm"], ["x86_64", "kvm", "hvm"]],
    }
    for kind in range(5)
]


def options() -> SelectionOptions:
    """Return the options with the filters and weighers of this benchmark."""
    conf = cfg.ConfigOpts()
    config.register(conf)
    conf([], default_config_files=[], default_config_dirs=[])
    conf.set_override("enabled_filters", FILTERS, "scheduler")
    conf.set_override("enabled_weighers", WEIGHERS, "scheduler")
    return service.options(conf)


def columns(size: int) -> Snapshot:
    """Return a snapshot of ``size`` hosts, some full, some down, in 2 zones and 20 aggregates."""
    dice = np.random.default_rng(size)
    names = [f"host{number}" for number in range(size)]

    def stock(total: int) -> Stock:
        free = (total * dice.uniform(0, 1, size)).astype(np.int64)
        return Stock(free, np.ones(size, np.int64), np.full(size, total), np.ones(size, np.int64))

    def few(most: int) -> Numbers:
        return dice.integers(0, most, size)

    yes = np.ones(size, np.bool_)
    aggregates = [
        Aggregate(
            number,
            f"a{number}",
            {"ssd": "true"} if number % 2 else {"rack": f"r{number}"},
            dice.random(size) < 0.5,
        )
        for number in range(20)
    ]
    return Snapshot(
        names,
        {name: row for row, name in enumerate(names)},
        np.array([seed(name) for name in names], np.uint64),
        yes,
        dice.random(size) < 0.01,
        ~yes,
        dice.random(size) < 0.99,
        few(2),
        {"az1": 0, "az2": 1},
        {"VCPU": stock(256), "MEMORY_MB": stock(512 * 1024), "DISK_GB": stock(4000)},
        servers=few(40),
        working=few(4),
        failures=np.where(dice.random(size) < 0.01, 1, 0),
        waits=np.zeros(size, np.int64),
        versions=7002000 + few(5),
        kinds=few(5),
        facts=list(FACTS),
        aggregates=aggregates,
        devices=np.zeros(size, np.int64),
    )


def request(server: str = "s", **more: Any) -> RequestSpec:
    return of(server, "p", FLAVOR, IMAGE, availability_zone="az1", **more)


def best_of(work: Callable[[], object], tries: int = 15) -> tuple[float, float]:
    """Return the minimum and the median of several tries in milliseconds."""
    durations = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        durations.append((time.perf_counter() - start) * 1000)
    return min(durations), statistics.median(durations)


def decide(size: int, chosen: SelectionOptions) -> None:
    """Measure decisions for one server, for a hundred servers and without a fitting host.

    The times include the copy of the snapshot.
    """
    base = columns(size)
    many = [request(f"s{number}") for number in range(100)]
    different = [
        replace(spec, resources={**spec.resources, "VCPU": 1 + number % 10})
        for number, spec in enumerate(many)
    ]
    rows = {
        "one server": [many[0]],
        "100 servers": many,
        "100 servers of 10 sizes": different,
        "no host fits": [replace(many[0], resources={"VCPU": 999})],
    }
    figures = {
        label: best_of(partial(lambda specs: select(base.copy(), specs, chosen), specs))
        for label, specs in rows.items()
    }
    figures["explain"] = best_of(lambda: explain(base.copy(), many[0], chosen), 5)
    for label, (best, median) in figures.items():
        print(f"{size:>7,} hosts, {label + ':':<25} {best:8.2f} ms (median {median:.2f})")
    print(
        f"{'':>7} 100 servers cost {figures['100 servers'][0] / figures['one server'][0]:.1f} times one"
    )


# fmt: off
def fill_store(folder: Path, size: int) -> Store:
    """Return a database with ``size`` hosts and three servers on each host."""
    store = Store(f"sqlite:///{folder}/{size}.db")
    schema.metadata.create_all(store.engine)
    now, traits = time.time_ns() // 1000, [f"HW_CPU_X86_{number}" for number in range(40)]
    with store.begin() as tx:
        for start in range(0, size, 2000):
            numbers = range(start + 1, min(start + 2000, size) + 1)
            names = {number: f"host{number}" for number in numbers}
            rows: dict[sa.Table, list[dict[str, Any]]] = {
                schema.providers: [{"id": number, "uuid": str(number), "name": name, "host": name, "generation": 1,
                                    "root_uuid": str(number), "created_at": now, "changed_at": now - 3600 * SECOND}
                                   for number, name in names.items()],
                schema.services: [{"uuid": str(number), "host": name, "binary": "nova-compute", "created_at": now,
                                   "updated_at": now} for number, name in names.items()],
                schema.heartbeats: [{"host": name, "binary": "nova-compute", "seen_at": now, "up": True}
                                    for name in names.values()],
                schema.hosts: [{"name": name, "session": 1, "hypervisor_type": "QEMU", "hypervisor_version": 7002000,
                                "hypervisor_hostname": name, "host_ip": "192.0.2.1", "traits": traits,
                                "cpu_info": FACTS[number % 5]["cpu_info"], "facts": {"supported_instances": [
                                    ["x86_64", "kvm", "hvm"]]}, "created_at": now, "updated_at": now}
                               for number, name in names.items()],
                schema.inventories: [{"provider_id": number, "resource_class": name, "total": total, "reserved": 0,
                                      "max_unit": total, "allocation_ratio": 1.0} for number in numbers
                                     for name, total in (("VCPU", 256), ("MEMORY_MB", 524288), ("DISK_GB", 4000))],
                schema.provider_traits: [{"provider_id": number, "trait": trait, "by_hand": False} for number in numbers
                                         for trait in traits],
                schema.allocations: [{"provider_id": number, "consumer_id": f"{number}-{server}",
                                      "resource_class": name, "used": 2} for number in numbers for server in range(3)
                                     for name in ("VCPU", "MEMORY_MB", "DISK_GB")],
                schema.guests: [{"server_id": f"{number}-{server}", "host": name, "fence": 1, "wanted": "running",
                                 "may_run": True, "changed_at": now} for number, name in names.items()
                                for server in range(3)]}
            for table, values in rows.items():
                tx.execute(sa.insert(table), values)
    return store
# fmt: on


def read(folder: Path, size: int) -> None:
    """Measure the first read of all hosts, then reads after changes of 0, 1 and 100 hosts."""
    store = fill_store(folder, size)
    gc.collect()
    hosts = Hosts(store, Clock())
    start = time.perf_counter()
    hosts.refresh(at_once=True)
    print(
        f"{size:>7,} hosts, all read:                  {(time.perf_counter() - start) * 1000:8.0f} ms"
    )
    for changed in (0, 1, 100):
        durations = []
        for _ in range(10):
            with store.begin() as tx:
                tx.execute(
                    sa.update(schema.providers)
                    .where(schema.providers.c.id <= changed)
                    .values(changed_at=time.time_ns() // 1000)
                )
            start = time.perf_counter()
            hosts.refresh(at_once=True)
            durations.append((time.perf_counter() - start) * 1000)
        print(f"{size:>7,} hosts, {changed:>3} changed:               {min(durations):8.2f} ms")
    print(f"{size:>7,} hosts, a copy to take from:       {best_of(hosts.snapshot)[0]:8.2f} ms")
    store.close()


def memory(folder: Path, size: int = 10_000) -> None:
    """Measure the memory of the columns of ``size`` hosts, and the peak while reading them."""
    store = fill_store(folder / "memory", size)
    Hosts(fill_store(folder / "warm", 10), Clock()).refresh()
    gc.collect()
    tracemalloc.start()
    hosts = Hosts(store, Clock())
    hosts.refresh(at_once=True)
    gc.collect()
    used_bytes, height = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"{size:>7,} hosts, memory:                    {used_bytes / 2**20:8.1f} MiB "
        f"(at its height {height / 2**20:.1f})"
    )
    store.close()
    assert hosts.snapshot().names


def main() -> None:
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.processor() or platform.machine()}; "
        f"{len(FILTERS)} filters, {len(WEIGHERS)} weighers, {len(hardware.OWN)} resource classes"
    )
    chosen = options()
    for size in SIZES:
        decide(size, chosen)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("memory", "warm"):
            (folder / part).mkdir()
        for size in SIZES:
            read(folder, size)
        memory(folder)


if __name__ == "__main__":
    main()
