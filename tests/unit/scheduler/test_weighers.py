# SPDX-License-Identifier: Apache-2.0
"""The preference of each weigher.

The tests cover multipliers of options and aggregates, and the effect of placed servers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

import numpy as np
import pytest

from common.domain.models import Flavor, RequestSpec
from scheduler import weighers
from scheduler.selection import select
from scheduler.snapshot import Aggregate, Group, ImageOnHosts, Snapshot
from scheduler.weighers import scores
from tests.unit.scheduler.conftest import conf, options

NANO = {"VCPU": 1, "MEMORY_MB": 128, "DISK_GB": 1}
MakeColumns = Callable[..., Snapshot]


def request(server: str = "s", **more: object) -> RequestSpec:
    return RequestSpec(server, "p", **{"resources": dict(NANO), **more})  # type: ignore[arg-type]


def order(
    hosts: Snapshot, weigher: str, spec: RequestSpec | None = None, **values: object
) -> list[str]:
    """Return the hosts, best first, with this weigher alone."""
    choices = select(
        hosts, [spec or request()], options(enabled_weighers=[weigher], hosts=10, **values)
    )
    return choices[0].selection.hosts


@pytest.mark.parametrize(
    ("weigher", "resource_class"),
    [("RAMWeigher", "MEMORY_MB"), ("CPUWeigher", "VCPU"), ("DiskWeigher", "DISK_GB")],
)
def test_resource_weigher_prefers_most_free_host(
    make_columns: MakeColumns, weigher: str, resource_class: str
) -> None:
    hosts = make_columns(3, 1000, 100_000, 1000)
    hosts.stock[resource_class].free[:] = [200, 900, 500]
    assert order(hosts, weigher) == ["host1", "host2", "host0"]


@pytest.mark.parametrize(
    ("weigher", "column", "expected"),
    [
        ("IoOpsWeigher", "working", ["host1", "host2", "host0"]),
        ("BuildFailureWeigher", "failures", ["host1", "host2", "host0"]),
        ("HypervisorVersionWeigher", "versions", ["host0", "host2", "host1"]),
        ("PCIWeigher", "devices", ["host1", "host2", "host0"]),
    ],
)
def test_weighers_prefer_newer_hosts_with_fewer_io_ops_failures_devices(
    make_columns: MakeColumns, weigher: str, column: str, expected: list[str]
) -> None:
    hosts = make_columns(3)
    getattr(hosts, column)[:] = [4, 0, 2]
    assert order(hosts, weigher) == expected


def test_num_instances_weigher_orders_by_sign_of_multiplier(make_columns: MakeColumns) -> None:
    hosts = make_columns(3)
    hosts.servers[:] = [4, 0, 2]
    assert order(hosts, "NumInstancesWeigher", num_instances_weight_multiplier=1.0) == [
        "host0",
        "host2",
        "host1",
    ]
    assert order(hosts, "NumInstancesWeigher", num_instances_weight_multiplier=-1.0)[0] == "host1"


@pytest.mark.parametrize(
    ("policy", "weigher", "first", "last"),
    [
        ("soft-affinity", "ServerGroupSoftAffinityWeigher", "host1", "host0"),
        ("soft-anti-affinity", "ServerGroupSoftAntiAffinityWeigher", "host0", "host1"),
    ],
)
def test_soft_group_weigher_orders_hosts_by_members(
    make_columns: MakeColumns, policy: str, weigher: str, first: str, last: str
) -> None:
    hosts = make_columns(3)
    hosts.groups["g"] = Group(policy, members={1: 3, 2: 1})
    ordered_hosts = order(hosts, weigher, request(group="g"))
    assert (ordered_hosts[0], ordered_hosts[-1]) == (first, last)


def test_soft_policy_places_servers_of_one_request_together_or_apart(
    make_columns: MakeColumns,
) -> None:
    """The soft affinity outweighs the weighers that spread servers over equal hosts."""
    selection_options = options(soft_affinity_weight_multiplier=10.0)
    for policy, number in (("soft-affinity", 1), ("soft-anti-affinity", 4)):
        hosts = make_columns(4)
        hosts.groups["g"] = Group(policy)
        choices = select(
            hosts, [request(f"s{index}", group="g") for index in range(4)], selection_options
        )
        assert len({choice.selection.hosts[0] for choice in choices}) == number, policy


def test_metrics_weigher_ranks_host_without_metric_last_or_rejects_if_required(
    make_columns: MakeColumns,
) -> None:
    hosts = make_columns(3)
    hosts.metrics = {"cpu": np.array([0.9, 0.1, np.nan]), "net": np.array([1.0, 1.0, 1.0])}
    values: dict[str, object] = {"metrics__weight_setting": ["cpu=-1", "net=0.5"]}
    assert order(
        hosts,
        "MetricsWeigher",
        metrics__required=False,
        metrics__weight_of_unavailable=-1.0,
        **values,
    ) == ["host1", "host0", "host2"]
    choices = select(hosts, [request(excluded=["host0", "host1"])], options(**values))
    assert choices[0].selection.by_host["host2"] == "without the metric cpu"
    assert order(hosts, "MetricsWeigher", **values) == ["host1", "host0"]


def test_image_properties_weigher_prefers_hosts_with_similar_images(
    make_columns: MakeColumns,
) -> None:
    hosts = make_columns(3)
    hosts.images = [
        ImageOnHosts({"os_distro": "debian", "x": "1"}, np.array([2]), np.array([3])),
        ImageOnHosts({"os_distro": "windows", "x": "1"}, np.array([1]), np.array([9])),
    ]
    spec = request(image_properties={"os_distro": "debian", "x": "1"})
    assert (
        order(hosts, "ImagePropertiesWeigher", spec, image_props_weight_multiplier=1.0)[0]
        == "host1"
    )
    for multiplier, place in ((1.0, 0), (-1.0, -1)):
        assert (
            order(
                hosts,
                "ImagePropertiesWeigher",
                spec,
                image_props_weight_setting=["os_distro=2"],
                image_props_weight_multiplier=multiplier,
            )[place]
            == "host2"
        )


def test_build_failure_weigher_outweighs_others_but_keeps_their_order(
    make_columns: MakeColumns,
) -> None:
    hosts = make_columns(3)
    hosts.failures[0] = 1
    hosts.stock["MEMORY_MB"].free[:] = [8192, 1024, 4096]
    for number in range(20):
        ordered_hosts = select(hosts.copy(), [request(f"s{number}")], options())[0].selection.hosts
        assert ordered_hosts == ["host2", "host1", "host0"]


def build_aggregates(key: str, *texts: tuple[str, list[bool]]) -> list[Aggregate]:
    return [
        Aggregate(number, str(number), {key: text}, np.array(members, np.bool_))
        for number, (text, members) in enumerate(texts)
    ]


def test_smallest_multiplier_of_aggregates_applies(make_columns: MakeColumns) -> None:
    hosts = make_columns(4)
    hosts.stock["MEMORY_MB"].free[:] = [8000, 8000, 8000, 1000]
    hosts.aggregates = build_aggregates(
        "ram_weight_multiplier",
        ("5", [True, True, True, False]),
        ("-3", [False, True, False, False]),
        ("many", [False, False, True, False]),
    )
    (weigher,) = options(enabled_weighers=["RAMWeigher"]).weighers
    weights = scores(hosts, request(), np.arange(4), [weigher]).score
    assert np.round(weights, 0).tolist() == [5, -3, 1, 0]


def test_aggregate_multiplier_enables_weigher_with_zero_default(make_columns: MakeColumns) -> None:
    hosts = make_columns(2)
    hosts.servers[:] = [5, 0]
    hosts.aggregates = build_aggregates("num_instances_weight_multiplier", ("2.0", [True, True]))
    assert order(hosts, "NumInstancesWeigher") == ["host0", "host1"]


def test_pci_weigher_step_is_number_of_requested_devices(make_columns: MakeColumns) -> None:
    hosts = make_columns(2)
    hosts.devices[:] = [2, 2]
    flavor = Flavor("1", "gpu", 1, 128, 1, extra_specs={"kilonova:devices": "gpu=10de:1db4:2"})
    (weigher,) = options(enabled_weighers=["PCIWeigher"]).weighers
    assert weigher.step(hosts, request(flavor=flavor)) == 2.0
    assert weigher.step(hosts, request()) == 0.0


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("nothing:here", "cannot be created: ModuleNotFoundError"),
        ("builtins:repr", "did not return a Weigher"),
    ],
)
def test_third_party_weigher_with_error_raises_unknown_weigher(
    monkeypatch: pytest.MonkeyPatch, reference: str, text: str
) -> None:
    point = metadata.EntryPoint("TheirWeigher", reference, weighers.ENTRY_POINTS)
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == weighers.ENTRY_POINTS else []
    )
    with pytest.raises(weighers.UnknownWeigher, match=f"TheirWeigher .*{text}"):
        weighers.load(conf(enabled_weighers=["RAMWeigher", "TheirWeigher"]))


def test_third_party_weigher_orders_hosts(
    make_columns: MakeColumns, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = metadata.EntryPoint(
        "TheirWeigher",
        "tests.unit.scheduler.test_weighers:load_name_weigher",
        weighers.ENTRY_POINTS,
    )
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: [point] if group == weighers.ENTRY_POINTS else []
    )
    assert order(make_columns(3), "TheirWeigher") == ["host2", "host1", "host0"]


def load_name_weigher(conf: object) -> weighers.Weigher:
    """Create a weigher in the form of a third party."""
    return weighers.Weigher(
        "name_weight_multiplier", lambda snapshot, spec, rows: rows.astype(np.float64)
    )
