# SPDX-License-Identifier: Apache-2.0
"""The capabilities of a host as traits of os-traits, for both drivers (libvirt and memory).

A feature of the processor becomes a trait if os-traits has a name for it. This is nearly always the
name of the feature. ``OTHER_NAMES`` contains the exceptions.

Invariant: a driver provides every trait that it reports.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import os_traits

PREFIX = "HW_CPU_X86_"
#: Traits of every driver.
COMMON = frozenset(
    {
        "COMPUTE_NODE",
        "COMPUTE_IMAGE_TYPE_QCOW2",
        "COMPUTE_IMAGE_TYPE_RAW",
        "COMPUTE_NET_ATTACH_INTERFACE",
    }
)
#: Traits that a guest with shares needs.
SHARES = frozenset({"COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE"})
#: Traits of every driver for volumes.
VOLUMES = frozenset(
    {
        "COMPUTE_RESCUE_BFV",
        "COMPUTE_VOLUME_ATTACH",
        "COMPUTE_VOLUME_ATTACH_WITH_TAG",
        "COMPUTE_VOLUME_EXTEND",
        "COMPUTE_VOLUME_MULTI_ATTACH",
    }
)
#: libvirt's name of a feature -> endings of its traits, if these differ from that name.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "aes": ("AESNI",),
    "amd-no-ssb": ("AMD_NO_SSB",),
    "amd-ssbd": ("AMD_SSBD",),
    "bmi1": ("BMI",),
    "fma": ("FMA3",),
    "gfni": ("AVX512GFNI",),
    "hle": ("TSX",),
    "ibpb": ("AMD_IBPB",),
    "md-clear": ("INTEL_MD_CLEAR",),
    "pcid": ("INTEL_PCID",),
    "pclmuldq": ("CLMUL",),
    "pni": ("SSE3",),
    "rtm": ("TSX",),
    "sha-ni": ("SHA",),
    "spec-ctrl": ("INTEL_SPEC_CTRL",),
    "ssbd": ("INTEL_SSBD",),
    "svm": ("SVM", "AMD_SVM"),
    "vaes": ("AVX512VAES",),
    "virt-ssbd": ("AMD_VIRT_SSBD",),
    "vmx": ("VMX", "INTEL_VMX"),
    "vpclmulqdq": ("AVX512VPCLMULQDQ",),
}


def of_processor(features: Iterable[str]) -> set[str]:
    """Return the traits of a processor with these features.

    Features without a trait in os-traits are left out.

    Args:
        features: Features by libvirt's names, for example "aes".
    """
    names = _names()
    traits: set[str] = set()
    for feature in features:
        if feature in OTHER_NAMES:
            traits.update(PREFIX + end for end in OTHER_NAMES[feature])
        elif (key := _normalize(feature)) in names:
            traits.add(names[key])
    return traits


@functools.cache
def _names() -> dict[str, str]:
    return {_normalize(trait.removeprefix(PREFIX)): trait for trait in os_traits.get_traits(PREFIX)}


def _normalize(name: str) -> str:
    return re.sub("[^A-Z0-9]", "", name.upper())
