# SPDX-License-Identifier: Apache-2.0
"""Parses the hardware that a flavor and an image request. Pure.

The API refuses hardware that no host can provide, placement derives the needed resources, and the
agent builds the domain. All three read the same frozen flavor and image properties, so they cannot
disagree. docs/flavors.md lists the supported hardware.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from common.domain.hardware import options
from common.domain.hardware.cpus import dedicated_cpus, numa_nodes, pages, topology
from common.domain.hardware.options import OPTIONS, devices, with_aliases
from common.domain.hardware.options import OWN as OWN_SPECS
from common.domain.hardware.specs import (
    ANY,
    LARGE,
    NOT_ASKED,
    SMALL,
    DeviceRequest,
    Hardware,
    HardwareSpecs,
    NumaNodeRequest,
    one_of,
    read,
    refusal,
    whole,
)
from common.domain.json_types import JsonMapping
from common.domain.models import Flavor

__all__ = [
    "ANY",
    "LARGE",
    "NOT_ASKED",
    "OWN",
    "OWN_SPECS",
    "SMALL",
    "DeviceRequest",
    "Hardware",
    "NumaNodeRequest",
    "hardware",
    "resources",
    "traits",
    "with_aliases",
]
#: Resource classes of all hosts. Operators may add others (CUSTOM_*).
OWN = ("VCPU", "PCPU", "MEMORY_MB", "DISK_GB")
_RESOURCES, _TRAIT = "resources:", "trait:"
#: Image properties that not every host's emulator supports -> prefix of the traits of the hosts
#: with support.
_DEVICES = {
    "hw_disk_bus": "COMPUTE_STORAGE_BUS_",
    "hw_cdrom_bus": "COMPUTE_STORAGE_BUS_",
    "hw_video_model": "COMPUTE_GRAPHICS_MODEL_",
    "hw_vif_model": "COMPUTE_NET_VIF_MODEL_",
}
#: Key of a frozen image: a volume takes the place of the root disk.
ON_VOLUME = "on_volume"
_NAME = re.compile("[A-Z0-9_]{1,255}", re.ASCII)


def hardware(flavor: Flavor, properties: Mapping[str, str]) -> Hardware:
    """Return the hardware that this flavor and these image properties request.

    Raises:
        BadRequest: A value is invalid, or hosts cannot provide the hardware. The text names the
            extra spec or the property.
    """
    requested = HardwareSpecs(flavor, properties)
    options.check(requested)
    sockets, cores, threads_per_core = topology(requested)
    own, threads = dedicated_cpus(requested)
    page = pages(requested)
    return Hardware(
        sockets,
        cores,
        threads_per_core,
        numa_nodes(requested, bool(own or page), page),
        own,
        threads,
        page,
        devices(requested),
        options.options(requested),
    )


def resources(flavor: Flavor, properties: Mapping[str, str]) -> dict[str, int]:
    """Return resource class -> amount that a server of this flavor and image holds on a host.

    An extra spec ``resources:CLASS`` replaces the flavor's amount. ``resources:PCPU`` only makes
    CPUs dedicated. Amounts of 0 are left out. The scheduler gets these amounts, the claim takes
    them, and the doctor verifies them.

    Raises:
        BadRequest: A requested resource or CPU policy is invalid, or the server would hold no
            resource.
    """
    requested = HardwareSpecs(flavor, properties)
    own = len(dedicated_cpus(requested)[0])
    amounts = dict(
        zip(OWN, (flavor.vcpus - own, own, flavor.memory_mb, flavor.disk_gb), strict=True)
    )
    for name, value in requested.specs.items():
        if name.startswith(_RESOURCES):
            amount, kind = read(name, value, whole()), name.removeprefix(_RESOURCES)
            if (
                amount
                and kind not in OWN
                and not (kind.startswith("CUSTOM_") and _NAME.fullmatch(kind))
            ):
                raise refusal(name, "hosts of this cloud have no such resource.")
            if kind != "PCPU":  # resources:PCPU only makes the flavor's CPUs dedicated.
                amounts[kind] = amount
    positive_amounts = {kind: amount for kind, amount in amounts.items() if amount}
    if not positive_amounts:
        raise refusal(
            _RESOURCES + "VCPU",
            "a server must use at least one resource of its host.",
        )
    return positive_amounts


def on_host(flavor: Flavor, image: JsonMapping | None) -> Flavor:
    """Return a server's flavor, without root disk if the server boots from a volume.

    The server boots from a volume if the frozen image in the server's row has ``ON_VOLUME``.
    """
    return replace(flavor, root_gb=0) if image and image.get(ON_VOLUME) else flavor


def resources_of(flavor: Flavor, image: JsonMapping | None) -> dict[str, int]:
    """Return the resources that a server with this flavor and frozen image holds on a host.

    Raises:
        BadRequest: As ``resources``.
    """
    return resources(on_host(flavor, image), (image or {}).get("properties", {}))


def traits(flavor: Flavor, properties: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the sorted required and the sorted forbidden traits of hosts for a server.

    An image property that selects a device model other than "none", for example hw_disk_bus,
    requires the model's trait.

    Raises:
        BadRequest: A trait is invalid, or required and forbidden at once. Or an image property
            that selects a device model is invalid.
    """
    requested = HardwareSpecs(flavor, properties)
    host_traits: dict[str, set[str]] = {"required": set(), "forbidden": set()}
    for texts, words in (
        (requested.specs, ("required", "forbidden")),
        (requested.properties, ("required",)),
    ):
        for name, value in texts.items():
            if name.startswith(_TRAIT):
                trait = name.removeprefix(_TRAIT)
                if not _NAME.fullmatch(trait):
                    raise refusal(
                        name,
                        "a trait's name consists of 1 to 255 capital letters, digits and underscores.",
                    )
                host_traits[read(name, value, one_of(*words))].add(trait)
    for option in OPTIONS:
        model = requested.image(option.image, option.parse) if option.image in _DEVICES else None
        if model and model != "none":
            host_traits["required"].add(_DEVICES[option.image] + model.upper())
    for trait in sorted(host_traits["required"] & host_traits["forbidden"]):
        raise refusal(
            _TRAIT + trait, "required and forbidden at once, by the flavor and the image."
        )
    return sorted(host_traits["required"]), sorted(host_traits["forbidden"])
