# SPDX-License-Identifier: Apache-2.0
"""The meaning of each filter for one host, in a slow and obvious form.

The form follows Nova's documentation. ``REFERENCE`` has a plain function for each filter, which
returns whether this host may take a server of this request. The reference shares no code with
``scheduler.filters``. Only the assignment of NUMA nodes and devices comes from
``common.domain.numa`` for both.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable

from common.domain import numa
from common.domain.errors import BadRequest
from common.domain.hardware import Hardware, hardware
from common.domain.models import RequestSpec
from tests.unit.scheduler.filter_world import Host, World

Passes = Callable[[Host, RequestSpec, World], bool]


# --- extra specs ---
def parse_number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\s*[+-]?\d+(\.\d+)?\s*", text) else None


def match(value: str, requirement: str) -> bool:
    words = requirement.split()
    first = words[0] if words else None
    if first == "<or>":
        alternatives = [word for position, word in enumerate(words) if position % 2 == 1]
        return value in alternatives
    if first not in (
        "=",
        "==",
        "!=",
        ">=",
        "<=",
        "s==",
        "s!=",
        "s>=",
        "s>",
        "s<=",
        "s<",
        "<in>",
        "<all-in>",
    ):
        return value == requirement
    if len(words) == 1:
        return False
    if first == "<all-in>":
        return [word for word in words[1:] if word not in value] == []
    operand = words[1]
    if first == "<in>":
        return operand in value
    if first.startswith("s"):
        return {
            "s==": value == operand,
            "s!=": value != operand,
            "s>=": value >= operand,
            "s>": value > operand,
            "s<=": value <= operand,
            "s<": value < operand,
        }[first]
    left, right = parse_number(value), parse_number(operand)
    if left is None or right is None:
        return False
    return {
        "=": left >= right,
        "==": left == right,
        "!=": left != right,
        ">=": left >= right,
        "<=": left <= right,
    }[first]


def metadata(host: Host) -> dict[str, set[str]]:
    """Return all values of the host's aggregates by key, with lists split into their parts."""
    values_by_key: dict[str, set[str]] = defaultdict(set)
    for meta in host.aggregates:
        for key, value in meta.items():
            for part in value.split(","):
                values_by_key[key].add(part.strip())
    return dict(values_by_key)


def extra_specs(spec: RequestSpec) -> dict[str, str]:
    return spec.flavor.extra_specs if spec.flavor else {}


# --- aggregates ---
def aggregate_instance_extra_specs(host: Host, spec: RequestSpec, world: World) -> bool:
    for key, requirement in extra_specs(spec).items():
        if ":" in key:
            scope, key = key.split(":", 1)
            if scope != "aggregate_instance_extra_specs":
                continue
        if not any(match(value, requirement) for value in metadata(host).get(key, ())):
            return False
    return True


def image_words(spec: RequestSpec) -> dict[str, str]:
    """Return the image's properties, with current names and values instead of former ones."""
    current_names = {
        "architecture": "hw_architecture",
        "hypervisor_type": "img_hv_type",
        "vm_mode": "hw_vm_mode",
        "hypervisor_version_requires": "img_hv_requested_version",
    }
    properties = {}
    for name, value in spec.image_properties.items():
        if name not in current_names:
            properties[name] = value
    for old, new in current_names.items():
        if old in spec.image_properties and new not in properties:
            properties[new] = spec.image_properties[old]
    current_values = {
        "hw_architecture": {"amd64": "x86_64", "i486": "i686"},
        "img_hv_type": {"xapi": "xen"},
        "hw_vm_mode": {"hv": "hvm"},
    }
    for name, words in current_values.items():
        if name in properties:
            properties[name] = words.get(properties[name].lower(), properties[name].lower())
    return properties


def aggregate_image_properties(host: Host, spec: RequestSpec, world: World) -> bool:
    options = world.conf.scheduler
    namespace = options.aggregate_image_properties_isolation_namespace
    for key, values in metadata(host).items():
        if namespace and not key.startswith(
            namespace + options.aggregate_image_properties_isolation_separator
        ):
            continue
        value = image_words(spec).get(key)
        if value and value not in values:
            return False
    return True


def multi_tenancy(host: Host, spec: RequestSpec, world: World) -> bool:
    lists = [values for key, values in metadata(host).items() if key.startswith("filter_tenant_id")]
    return not lists or any(spec.project_id in values for values in lists)


def type_affinity(host: Host, spec: RequestSpec, world: World) -> bool:
    flavors = metadata(host).get("instance_type")
    return flavors is None or (spec.flavor is not None and spec.flavor.name in flavors)


def limit(host: Host, key: str, default: int) -> int:
    values = [meta[key] for meta in host.aggregates if key in meta]
    if not values or not all(re.fullmatch(r"\s*-?\d+\s*", value) for value in values):
        return default
    return min(int(value) for value in values)


def num_instances(host: Host, spec: RequestSpec, world: World) -> bool:
    return host.servers < world.conf.scheduler.max_instances_per_host


def aggregate_num_instances(host: Host, spec: RequestSpec, world: World) -> bool:
    return host.servers < limit(
        host, "max_instances_per_host", world.conf.scheduler.max_instances_per_host
    )


def io_ops(host: Host, spec: RequestSpec, world: World) -> bool:
    return host.working < world.conf.scheduler.max_io_ops_per_host


def aggregate_io_ops(host: Host, spec: RequestSpec, world: World) -> bool:
    return host.working < limit(
        host, "max_io_ops_per_host", world.conf.scheduler.max_io_ops_per_host
    )


# --- the host ---
def all_hosts(host: Host, spec: RequestSpec, world: World) -> bool:
    return True


def compute(host: Host, spec: RequestSpec, world: World) -> bool:
    return host.served and host.up and not host.forced_down


def availability_zone(host: Host, spec: RequestSpec, world: World) -> bool:
    return spec.availability_zone in (None, host.zone)


def compute_capabilities(host: Host, spec: RequestSpec, world: World) -> bool:
    state = {
        **host.facts,
        "num_instances": host.servers,
        "num_io_ops": host.working,
        "failed_builds": host.failures,
        "free_ram_mb": host.free.get("MEMORY_MB", 0),
        "free_disk_mb": host.free.get("DISK_GB", 0) * 1024,
        "total_usable_ram_mb": host.units.get("MEMORY_MB", (0, 0, 0))[1],
        "vcpus_total": host.units.get("VCPU", (0, 0, 0))[1],
    }
    for key, requirement in extra_specs(spec).items():
        if key == "hw:maxphysaddr_bits":
            key, requirement = "capabilities:cpu_info:maxphysaddr:bits", ">= " + requirement
        parts = key.split(":")
        if (len(parts) == 1 and key not in state) or (
            len(parts) > 1 and parts[0] != "capabilities"
        ):
            continue
        current_value: object = state
        for part in parts if len(parts) == 1 else parts[1:]:
            if isinstance(current_value, str) and current_value.startswith("{"):
                current_value = json.loads(current_value)
            current_value = current_value.get(part) if isinstance(current_value, dict) else None
        if current_value is None or not match(str(current_value), requirement):
            return False
    return True


def image_properties(host: Host, spec: RequestSpec, world: World) -> bool:
    image = image_words(spec)
    required_words = [
        image.get("hw_architecture", world.conf.scheduler.image_properties_default_architecture),
        image.get("img_hv_type"),
        image.get("hw_vm_mode"),
    ]
    required_words = [word for word in required_words if word]
    if not required_words:
        return True
    if not [
        supported
        for supported in host.facts.get("supported_instances", [])
        if all(word in supported for word in required_words)
    ]:
        return False
    version = host.facts.get("hypervisor_version")
    if version and image.get("img_hv_requested_version"):
        host_version = [version // 1000000, version // 1000 % 1000, version % 1000]
        for clause in image["img_hv_requested_version"].split(","):
            clause_match = re.fullmatch(r"\s*(<=|>=|<|>|!=|==)\s*(\d+(?:\.\d+)*)\s*", clause)
            if not clause_match:
                return False
            required_version = ([int(part) for part in clause_match[2].split(".")] + [0, 0])[:3]
            if not {
                "<": host_version < required_version,
                "<=": host_version <= required_version,
                ">": host_version > required_version,
                ">=": host_version >= required_version,
                "==": host_version == required_version,
                "!=": host_version != required_version,
            }[clause_match[1]]:
                return False
    bits = host.facts.get("cpu_info", {}).get("maxphysaddr", {}).get("bits")
    wanted_bits = image.get("hw_maxphysaddr_bits")
    return not bits or not wanted_bits or (wanted_bits.isdigit() and bits >= int(wanted_bits))


def isolated_hosts(host: Host, spec: RequestSpec, world: World) -> bool:
    options = world.conf.scheduler
    image_is, host_is = (
        spec.image_id in options.isolated_images,
        host.name in options.isolated_hosts,
    )
    if options.restrict_isolated_hosts_to_isolated_images:
        return image_is == host_is
    return host_is or not image_is


# --- other servers ---
def hinted_hosts(spec: RequestSpec, world: World, hint: str) -> list[str | None]:
    servers = spec.hints.get(hint, [])
    return [
        world.places.get(server) for server in ([servers] if isinstance(servers, str) else servers)
    ]


def different_host(host: Host, spec: RequestSpec, world: World) -> bool:
    return host.name not in hinted_hosts(spec, world, "different_host")


def same_host(host: Host, spec: RequestSpec, world: World) -> bool:
    hosts = hinted_hosts(spec, world, "same_host")
    return not hosts or host.name in hosts


def anti_affinity(host: Host, spec: RequestSpec, world: World) -> bool:
    return spec.group != "group" or world.policy != "anti-affinity" or host.in_group < world.most


def affinity(host: Host, spec: RequestSpec, world: World) -> bool:
    if (
        spec.group != "group"
        or world.policy != "affinity"
        or not any(other.in_group for other in world.hosts)
    ):
        return True
    # A moving server counts on two hosts.
    return host.in_group == sum(other.in_group for other in world.hosts)


# --- hardware of the host ---
def requested_hardware(spec: RequestSpec) -> Hardware | None:
    """Return the hardware of the request, or None if no host can provide the hardware."""
    try:
        return hardware(spec.flavor, spec.image_properties) if spec.flavor else Hardware()
    except BadRequest:
        return None


def numa_topology(host: Host, spec: RequestSpec, world: World) -> bool:
    requested = requested_hardware(spec)
    if requested is None or not (requested.numa_nodes or requested.dedicated):
        return requested is not None
    return numa.fit(host.numa_nodes, host.devices, host.held, requested) is not None


def pci_passthrough(host: Host, spec: RequestSpec, world: World) -> bool:
    """Compare the number of free devices.

    This is sufficient, because each request of the tests has one kind of devices.
    """
    requested = requested_hardware(spec)
    for request in requested.devices if requested else ():
        assigned = [address for assignment in host.held for address in assignment.devices]
        free = [
            device
            for device in host.devices
            if (device.vendor, device.product) in request.kinds and device.address not in assigned
        ]
        if len(free) < request.count:
            return False
    return requested is not None


REFERENCE: dict[str, Passes] = {
    "AggregateImagePropertiesIsolation": aggregate_image_properties,
    "AggregateInstanceExtraSpecsFilter": aggregate_instance_extra_specs,
    "AggregateIoOpsFilter": aggregate_io_ops,
    "AggregateMultiTenancyIsolation": multi_tenancy,
    "AggregateNumInstancesFilter": aggregate_num_instances,
    "AggregateTypeAffinityFilter": type_affinity,
    "AllHostsFilter": all_hosts,
    "AvailabilityZoneFilter": availability_zone,
    "ComputeCapabilitiesFilter": compute_capabilities,
    "ComputeFilter": compute,
    "DifferentHostFilter": different_host,
    "ImagePropertiesFilter": image_properties,
    "IoOpsFilter": io_ops,
    "IsolatedHostsFilter": isolated_hosts,
    "NumInstancesFilter": num_instances,
    "NUMATopologyFilter": numa_topology,
    "PciPassthroughFilter": pci_passthrough,
    "SameHostFilter": same_host,
    "ServerGroupAffinityFilter": affinity,
    "ServerGroupAntiAffinityFilter": anti_affinity,
}


# --- checks of every request ---
def resources(host: Host, spec: RequestSpec, world: World) -> bool:
    for name, amount in spec.resources.items():
        if amount > 0:
            least, most, step = host.units.get(name, (0, 0, 1))
            if name not in host.free or most == 0 or amount > host.free[name]:
                return False
            if amount < least or amount > most or amount % step:
                return False
    return True


def traits(host: Host, spec: RequestSpec, world: World) -> bool:
    return set(spec.required_traits) <= host.traits and not set(spec.forbidden_traits) & host.traits


def has_no_failed_builds(host: Host, spec: RequestSpec, world: World) -> bool:
    most = world.conf.scheduler.build_failure_limit
    return not most or host.failures < most or host.waits == 0


def matches_host_names(host: Host, spec: RequestSpec, world: World) -> bool:
    return (
        spec.force_host in (None, host.name)
        and spec.requested_host in (None, host.name)
        and host.name not in spec.excluded
    )


ON_REBUILD = ("AggregateImagePropertiesIsolation", "ImagePropertiesFilter", "IsolatedHostsFilter")
ALWAYS = (
    "NUMATopologyFilter",
    "PciPassthroughFilter",
    "ServerGroupAffinityFilter",
    "ServerGroupAntiAffinityFilter",
)


def may_take(host: Host, spec: RequestSpec, world: World, enabled: list[str]) -> bool:
    """Return True if the host may take the server with these filters enabled."""
    if not matches_host_names(host, spec, world):
        return False
    if spec.is_rebuild:
        image_traits = {name[6:] for name in spec.image_properties if name.startswith("trait:")}
        return image_traits <= host.traits and all(
            REFERENCE[name](host, spec, world) for name in enabled if name in ON_REBUILD
        )
    passes_always = (
        traits(host, spec, world)
        and resources(host, spec, world)
        and all(REFERENCE[name](host, spec, world) for name in ALWAYS)
    )
    if spec.force_host is not None:
        return passes_always and host.served and host.up and not host.forced_down
    return (
        passes_always
        and availability_zone(host, spec, world)
        and has_no_failed_builds(host, spec, world)
        and not host.disabled
        and all(REFERENCE[name](host, spec, world) for name in enabled)
    )
