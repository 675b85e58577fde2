# SPDX-License-Identifier: Apache-2.0
"""The fixtures of the placement service's own gabbi tests, created in Kilonova's store.

Each of those test files names a fixture. This module creates the providers that the tests expect:
trees, aggregates, inventories, traits and allocations. Environment variables carry their ids to the
tests. ``callers`` authenticates requests by header.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa
from gabbi.fixture import GabbiFixture

from common.store import schema
from common.store.engine import Store, now
from common.store.placement import allocations, inventories, providers, resource_classes, traits

SHARES = "MISC_SHARES_VIA_AGGREGATE"
GENERATED = (
    "RP_UUID",
    "RP_NAME",
    "RP_UUID1",
    "RP_NAME1",
    "RP_UUID2",
    "RP_NAME2",
    "PROJECT_ID",
    "ADMIN_PROJECT_ID",
    "SERVICE_PROJECT_ID",
    "USER_ID",
    "PROJECT_ID_ALT",
    "USER_ID_ALT",
    "INSTANCE_UUID",
    "MIGRATION_UUID",
    "CONSUMER_UUID",
    "PARENT_PROVIDER_UUID",
    "ALT_PARENT_PROVIDER_UUID",
)


class World:
    """An empty cloud to create providers in."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.uuids: dict[str, str] = {}

    def publish(self, **variables: str) -> None:
        """Set environment variables for the tests."""
        os.environ.update(variables)

    def fresh(self, *names: str) -> tuple[str, ...]:
        """Create a uuid for each name, publish it under the name, and return all uuids."""
        uuids = tuple(str(uuid.uuid4()) for _ in names)
        self.publish(**dict(zip(names, uuids, strict=True)))
        return uuids

    def provider(
        self,
        name: str,
        *aggregates: str,
        parent: str | None = None,
        variable: str = "",
        uuid: str | None = None,
        has: tuple[str, ...] = (),
        **stock: int | dict[str, Any],
    ) -> str:
        """Create a provider with inventories, such as VCPU=8 or VCPU={"total": 8, "max_unit": 2}.

        Args:
            name: Name, also the key in ``uuids``.
            aggregates: Aggregates that the provider belongs to.
            parent: Name of the parent provider.
            variable: Environment variable for the uuid, by default the upper-case name and "_UUID".
            uuid: The uuid, or None for a new one.
            has: Traits.
            stock: Resource class -> total or inventory.
        """

        def work(tx: sa.Connection) -> str:
            row = providers.create(tx, name, uuid, self.uuids[parent] if parent else None)
            providers.set_aggregates(tx, row, aggregates)
            for trait in has:
                traits.create(tx, trait)
            traits.put(tx, row, has)
            for resource_class in stock:
                resource_classes.create(tx, resource_class)
            inventory_by_class = {
                key: {"total": value} if isinstance(value, int) else value
                for key, value in stock.items()
            }
            for key, value in inventory_by_class.items():
                inventories.put(tx, row, {key: {"max_unit": value["total"], **value}}, whole=False)
                allocations.touch(tx, [row.id])
            return str(row.uuid)

        self.uuids[name] = self.store.write(work)
        self.publish(**{variable or f"{name.upper()}_UUID": self.uuids[name]})
        return self.uuids[name]

    def allocate(
        self, provider: str, consumer: str, project: str, user: str, **amounts: int
    ) -> None:
        """Create an allocation of a provider for a consumer."""
        with self.store.begin() as tx:
            row = providers.show(tx, provider)
            if (
                tx.scalar(sa.select(schema.consumers.c.id).where(schema.consumers.c.id == consumer))
                is None
            ):
                tx.execute(
                    sa.insert(schema.consumers).values(
                        id=consumer,
                        type="server",
                        project_id=project,
                        user_id=user,
                        generation=1,
                        created_at=now(),
                    )
                )
            allocations.touch(tx, [row.id])
            for resource_class, amount in amounts.items():
                tx.execute(
                    sa.insert(schema.allocations).values(
                        provider_id=row.id,
                        consumer_id=consumer,
                        resource_class=resource_class,
                        used=amount,
                    )
                )


def no_providers(world: World) -> None:
    """Publish names and ids without creating providers."""
    world.fresh(*GENERATED)
    world.publish(
        CUSTOM_RES_CLASS="CUSTOM_IRON_NFV",
        CUSTOM_RES_CLASS1="CUSTOM_IRON_NFV1",
        CUSTOM_RES_CLASS2="CUSTOM_IRON_NFV2",
    )


def one_allocated_provider(world: World) -> None:
    """Create one provider with allocations of three consumers, one project and two users."""
    no_providers(world)
    env = os.environ
    world.fresh(
        "ALT_USER_ID", "ALT_RP_UUID", "ALT_RP_NAME", "CONSUMER_0", "CONSUMER_ID", "ALT_CONSUMER_ID"
    )
    provider = world.provider(
        env["RP_NAME"],
        uuid=env["RP_UUID"],
        variable="RP_UUID",
        VCPU=10,
        DISK_GB={"total": 2048, "step_size": 10, "min_unit": 10, "max_unit": 1000},
    )
    project, user, other = env["PROJECT_ID"], env["USER_ID"], env["ALT_USER_ID"]
    world.allocate(provider, env["CONSUMER_0"], project, user, DISK_GB=1000)
    world.allocate(provider, env["CONSUMER_ID"], project, user, VCPU=6)
    world.allocate(provider, env["ALT_CONSUMER_ID"], project, other, DISK_GB=20, VCPU=1)


def shared_storage(world: World) -> None:
    """Create two hosts, one with a disk, two disks shared by aggregate, and NUMA network cards."""
    no_providers(world)
    (group,) = world.fresh("AGG_UUID")
    cpu: dict[str, Any] = {
        "VCPU": {"total": 24, "allocation_ratio": 16.0},
        "MEMORY_MB": {"total": 128 * 1024, "allocation_ratio": 1.5},
    }
    disk = {"total": 2000, "reserved": 100}
    world.provider("cn1", group, has=("HW_CPU_X86_SSE", "HW_CPU_X86_SSE2"), **cpu)
    world.provider("cn2", group, **cpu, DISK_GB=disk)
    for name in ("ss", "ss2"):
        world.provider(name, group, has=(SHARES,), DISK_GB=disk)
    for place in ("1_1", "1_2", "2_1", "2_2"):
        world.provider(f"numa{place}", parent=f"cn{place[0]}")
        world.provider(f"pf{place}", parent=f"numa{place}", SRIOV_NET_VF=8)


def numa_aggregates(world: World) -> None:
    """Create two hosts with two NUMA nodes each, and shared disks at different levels."""
    no_providers(world)
    a, b, c = world.fresh("AGGA_UUID", "AGGB_UUID", "AGGC_UUID")
    world.provider("cn1", a)
    world.provider("cn2", a, b)
    for name, group in (("ss1", a), ("ss2", c)):
        world.provider(name, group, has=(SHARES,), DISK_GB={"total": 2000, "reserved": 100})
    for place in ("1_1", "1_2", "2_1", "2_2"):
        world.provider(
            f"numa{place}",
            *((c,) if place == "1_1" else ()),
            parent=f"cn{place[0]}",
            VCPU={"total": 24, "allocation_ratio": 16.0},
        )


def numa_networks(world: World, *above: str) -> None:
    """Create a host with NUMA devices and network agents, and an ordinary one with network cards.

    ``above`` names the parents of both hosts.
    """
    no_providers(world)
    (group,) = world.fresh("AGGA_UUID")
    first, second = above or (None, None)
    world.provider("ss1", group, has=(SHARES,), DISK_GB=2000)
    world.provider("cn1", group, parent=first, has=("COMPUTE_VOLUME_MULTI_ATTACH",))
    world.provider(
        "numa0",
        parent="cn1",
        has=("HW_NUMA_ROOT",),
        VCPU=4,
        MEMORY_MB={"total": 2048, "min_unit": 512, "step_size": 256},
    )
    world.provider(
        "numa1",
        parent="cn1",
        has=("HW_NUMA_ROOT", "CUSTOM_FOO"),
        VCPU=4,
        MEMORY_MB={"total": 2048, "min_unit": 256, "max_unit": 1024},
    )
    world.allocate(world.uuids["numa0"], str(uuid.uuid4()), "numafx-project", "numafx-user", VCPU=2)
    for name, parent, resource_class in (
        ("fpga0", "numa0", "FPGA"),
        ("fpga1_0", "numa1", "FPGA"),
        ("fpga1_1", "numa1", "FPGA"),
    ):
        world.provider(name, parent=parent, **{resource_class: 1})
    world.provider("pgpu0", parent="numa0", VGPU=8)
    world.provider("sriov_agent", parent="cn1", has=("CUSTOM_VNIC_TYPE_DIRECT",))
    world.provider("ovs_agent", parent="cn1", has=("CUSTOM_VNIC_TYPE_NORMAL",))
    for name, parent, net, width in (
        ("esn1", "sriov_agent", 1, 10000),
        ("esn2", "sriov_agent", 2, 20000),
        ("br_int", "ovs_agent", 0, 1000),
    ):
        world.provider(
            name, parent=parent, has=(f"CUSTOM_PHYSNET{net}",), NET_BW_EGR_KILOBIT_PER_SEC=width
        )
    world.provider(
        "cn2",
        group,
        parent=second,
        has=("CUSTOM_FOO",),
        VCPU=8,
        DISK_GB=1000,
        MEMORY_MB={"total": 2048, "min_unit": 1024, "step_size": 128},
    )
    world.allocate(world.uuids["cn2"], str(uuid.uuid4()), "numafx-project", "numafx-user", VCPU=3)
    for card, functions in ((1, (4, 4)), (2, (2, 2, 2, 2)), (3, (8,))):
        world.provider(f"nic{card}", parent="cn2", has=("CUSTOM_HW_NIC_ROOT",))
        for number, total in enumerate(functions):
            world.provider(
                f"pf{card}_{number + 1}",
                parent=f"nic{card}",
                has=(f"CUSTOM_PHYSNET{number % 2 + 1}",),
                CUSTOM_VF=total,
            )


def deep_numa_networks(world: World) -> None:
    """Create the hosts of ``numa_networks`` below a common grandparent."""
    world.provider("gp1")
    world.provider("p1", parent="gp1")
    world.provider("p2", parent="gp1")
    numa_networks(world, "p1", "p2")


def own_storage(world: World) -> None:
    """Create three hosts with their own disks."""
    no_providers(world)
    world.fresh("AGGA_UUID", "AGGB_UUID", "AGGC_UUID")
    for number in (1, 2, 3):
        world.provider(f"cn{number}", VCPU=24, MEMORY_MB=128 * 1024, DISK_GB=2000)


def granular(world: World) -> None:
    """Create three hosts and three sharing providers, connected by three aggregates."""
    no_providers(world)
    a, b, c = world.fresh("AGGA", "AGGB", "AGGC")

    def add(name: str, *more: Any, **stock: Any) -> None:
        world.provider(name, *more, variable=name.upper(), **stock)

    add(
        "cn_left",
        a,
        VCPU=8,
        MEMORY_MB=4096,
        DISK_GB=500,
        VGPU=8,
        SRIOV_NET_VF=8,
        CUSTOM_NET_MBPS=4000,
        has=(
            "HW_CPU_X86_AVX",
            "HW_CPU_X86_AVX2",
            "HW_GPU_API_DXVA",
            "HW_NIC_DCB_PFC",
            "CUSTOM_FOO",
        ),
    )
    add(
        "cn_middle",
        a,
        b,
        VCPU=8,
        MEMORY_MB=4096,
        SRIOV_NET_VF=8,
        CUSTOM_NET_MBPS=4000,
        has=("HW_CPU_X86_AVX", "HW_CPU_X86_AVX2", "HW_CPU_X86_SSE", "HW_NIC_ACCEL_TLS"),
    )
    add(
        "cn_right",
        b,
        c,
        VCPU=8,
        MEMORY_MB=4096,
        DISK_GB=500,
        VGPU={"total": 8, "max_unit": 2},
        has=("HW_CPU_X86_MMX", "HW_GPU_API_DXVA", "CUSTOM_DISK_SSD"),
    )
    add("shr_disk_1", a, DISK_GB=1000, has=(SHARES, "CUSTOM_DISK_SSD"))
    add("shr_disk_2", a, b, DISK_GB=1000, has=(SHARES,))
    add("shr_net", c, SRIOV_NET_VF=16, CUSTOM_NET_MBPS=40000, has=(SHARES,))


#: Fixture name of the placement tests -> function. The policy fixtures create no providers, because
#: the service's own policies equal the policies of SecureRBAC.
WORLDS: Mapping[str, Callable[[World], None]] = {
    "APIFixture": no_providers,
    "AllocationFixture": one_allocated_provider,
    "SharedStorageFixture": shared_storage,
    "NUMAAggregateFixture": numa_aggregates,
    "NUMANetworkFixture": numa_networks,
    "DeepNUMANetworkFixture": deep_numa_networks,
    "NonSharedStorageFixture": own_storage,
    "GranularFixture": granular,
    "SecureRBACPolicyFixture": no_providers,
    "LegacyRBACPolicyFixture": no_providers,
    "OpenPolicyFixture": no_providers,
}


def fixtures(store: Store) -> SimpleNamespace:
    """Return a stand-in for gabbi's fixture module, with fixtures that fill the store."""

    def make_fixture(fill: Callable[[World], None]) -> type[GabbiFixture]:
        class Filled(GabbiFixture):  # type: ignore[misc]  # gabbi has no types
            def start_fixture(self) -> None:
                fill(World(store))

        return Filled

    return SimpleNamespace(**{name: make_fixture(fill) for name, fill in WORLDS.items()})


def callers(application: Any) -> Any:
    """Wrap the application so that X-Auth-Token, USER or USER:PROJECT, is trusted.

    The user admin has the role admin.
    """

    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        # gabbi's transport leaves characters where servers give bytes.
        environ["PATH_INFO"] = environ["PATH_INFO"].encode().decode("latin-1")
        user, _, project = environ.get("HTTP_X_AUTH_TOKEN", "").partition(":")
        if user:
            environ["HTTP_X_IDENTITY_STATUS"] = "Confirmed"
            environ["HTTP_X_USER_ID"] = user
            environ.setdefault("HTTP_X_ROLES", "admin" if user == "admin" else "")
            if not environ.get("HTTP_OPENSTACK_SYSTEM_SCOPE"):
                environ.setdefault("HTTP_X_PROJECT_ID", project or user)
        return application(environ, start_response)

    return entry
