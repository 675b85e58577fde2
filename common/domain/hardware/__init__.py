# SPDX-License-Identifier: Apache-2.0
"""What a flavor and an image say of a guest's hardware, understood once.

Pure. The API asks it to refuse what no host can carry out, placement what a server needs, the agent
how the domain
looks: all three from the same frozen flavor and image properties, so they cannot disagree.
docs/flavors.md has the list of what is carried out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from common.domain.hardware import options
from common.domain.hardware.cpus import dedicated, numa_nodes, pages, topology
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
#: Resource classes that hosts have, beside those that an operator adds (CUSTOM_*).
OWN = ("VCPU", "PCPU", "MEMORY_MB", "DISK_GB")
_RESOURCES, _TRAIT = "resources:", "trait:"
#: Properties of images that need what not every host's emulator has -> the traits of those that
#: have it.
_DEVICES = {
    "hw_disk_bus": "COMPUTE_STORAGE_BUS_",
    "hw_cdrom_bus": "COMPUTE_STORAGE_BUS_",
    "hw_video_model": "COMPUTE_GRAPHICS_MODEL_",
    "hw_vif_model": "COMPUTE_NET_VIF_MODEL_",
}
ON_VOLUME = "on_volume"  #: key of a frozen image: a volume takes the root disk's place
_NAME = re.compile("[A-Z0-9_]{1,255}", re.ASCII)


def hardware(flavor: Flavor, properties: Mapping[str, str]) -> Hardware:
    """What this flavor and these image properties ask for.

    Raises:
        BadRequest: a value that makes no sense, or something that hosts cannot carry out; it names
        the extra spec or
            the property.
    """
    requested = HardwareSpecs(flavor, properties)
    options.check(requested)
    sockets, cores, threads_per_core = topology(requested)
    own, threads = dedicated(requested)
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
    """Resource class -> amount that a server of this flavor and image holds of its host; no zeros,
    and not nothing: who holds nothing has no place. The scheduler is asked for these amounts, they
    are claimed, and the doctor proves them.

    Raises:
        BadRequest: as ``hardware``.
    """
    requested = HardwareSpecs(flavor, properties)
    own = len(dedicated(requested)[0])
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
            if kind != "PCPU":  # which says what the flavor's CPUs are
                amounts[kind] = amount
    held = {kind: amount for kind, amount in amounts.items() if amount}
    if not held:
        raise refusal(
            _RESOURCES + "VCPU",
            "a server must take something of its host; leave it at least one resource.",
        )
    return held


def on_host(flavor: Flavor, image: JsonMapping | None) -> Flavor:
    """A server's flavor as far as its host holds it. image: as it is frozen in the server's row; of
    one that boots from a volume it says so, and the host has no root disk of it."""
    return replace(flavor, root_gb=0) if image and image.get(ON_VOLUME) else flavor


def resources_of(flavor: Flavor, image: JsonMapping | None) -> dict[str, int]:
    """``resources`` of a server with this frozen image. Raises BadRequest."""
    return resources(on_host(flavor, image), (image or {}).get("properties", {}))


def traits(flavor: Flavor, properties: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The traits that a host must have, and those that it must not have, sorted. Raises
    BadRequest."""
    requested = HardwareSpecs(flavor, properties)
    found: dict[str, set[str]] = {"required": set(), "forbidden": set()}
    for given, words in (
        (requested.specs, ("required", "forbidden")),
        (requested.properties, ("required",)),
    ):
        for name, value in given.items():
            if name.startswith(_TRAIT):
                trait = name.removeprefix(_TRAIT)
                if not _NAME.fullmatch(trait):
                    raise refusal(
                        name, "a trait's name has capital letters, digits and underscores only."
                    )
                found[read(name, value, one_of(*words))].add(trait)
    for option in OPTIONS:
        model = requested.image(option.image, option.parse) if option.image in _DEVICES else None
        if model and model != "none":
            found["required"].add(_DEVICES[option.image] + model.upper())
    for trait in sorted(found["required"] & found["forbidden"]):
        raise refusal(
            _TRAIT + trait, "required and forbidden at once, by the image and the flavor."
        )
    return sorted(found["required"]), sorted(found["forbidden"])
