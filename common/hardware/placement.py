# SPDX-License-Identifier: Apache-2.0
"""What a server of a flavor and an image takes of its host's resources, and which traits the host must have.

Pure. The same amounts are asked of the scheduler, claimed, counted by quota's neighbours and proved by the doctor.
"""
from __future__ import annotations

import re

from common.hardware.asked import Asked, read, refusal
from common.hardware.cells import dedicated
from common.hardware.options import OPTIONS
from common.hardware.values import one_of, whole

#: Resource classes that hosts have, beside those that an operator adds (CUSTOM_*).
OWN = ("VCPU", "PCPU", "MEMORY_MB", "DISK_GB")
_RESOURCES, _TRAIT = "resources:", "trait:"
#: Properties of images that need what not every host's emulator has -> the traits of those that have it.
_DEVICES = {"hw_disk_bus": "COMPUTE_STORAGE_BUS_", "hw_cdrom_bus": "COMPUTE_STORAGE_BUS_",
            "hw_video_model": "COMPUTE_GRAPHICS_MODEL_", "hw_vif_model": "COMPUTE_NET_VIF_MODEL_"}
#: Of hosts whose agent makes disks beside the root disk: one of an earlier release would leave them out.
LOCAL_DISKS = "CUSTOM_KILONOVA_LOCAL_DISKS"
_NAME = re.compile("[A-Z0-9_]{1,255}", re.ASCII)


def resources(asked: Asked) -> dict[str, int]:
    """Resource class -> amount; no zeros, and not nothing: who holds nothing has no place."""
    flavor, own = asked.flavor, len(dedicated(asked)[0])
    amounts = dict(zip(OWN, (flavor.vcpus - own, own, flavor.memory_mb, flavor.disk_gb), strict=True))
    for name, value in asked.specs.items():
        if name.startswith(_RESOURCES):
            amount, kind = read(name, value, whole()), name.removeprefix(_RESOURCES)
            if amount and kind not in OWN and not (kind.startswith("CUSTOM_") and _NAME.fullmatch(kind)):
                raise refusal(name, "hosts of this cloud have no such resource.")
            if kind != "PCPU":          # which says what the flavor's CPUs are
                amounts[kind] = amount
    held = {kind: amount for kind, amount in amounts.items() if amount}
    if not held:
        raise refusal(_RESOURCES + "VCPU", "a server must take something of its host; leave it at least one resource.")
    return held


def traits(asked: Asked) -> tuple[list[str], list[str]]:
    """The traits that a host must have, and those that it must not have, sorted."""
    found: dict[str, set[str]] = {"required": set(), "forbidden": set()}
    for given, words in ((asked.specs, ("required", "forbidden")), (asked.properties, ("required",))):
        for name, value in given.items():
            if name.startswith(_TRAIT):
                trait = name.removeprefix(_TRAIT)
                if not _NAME.fullmatch(trait):
                    raise refusal(name, "a trait's name has capital letters, digits and underscores only.")
                found[read(name, value, one_of(*words))].add(trait)
    if asked.flavor.ephemeral_gb or asked.flavor.swap_mb:
        found["required"].add(LOCAL_DISKS)
    for option in OPTIONS:
        model = asked.image(option.image, option.parse) if option.image in _DEVICES else None
        if model and model != "none":
            found["required"].add(_DEVICES[option.image] + model.upper())
    for trait in sorted(found["required"] & found["forbidden"]):
        raise refusal(_TRAIT + trait, "required and forbidden at once, by the image and the flavor.")
    return sorted(found["required"]), sorted(found["forbidden"])
