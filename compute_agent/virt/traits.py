# SPDX-License-Identifier: Apache-2.0
"""The abilities of a host as traits of os-traits.

Used by both drivers. A feature of the processor becomes a trait when os-traits has a name for it:
nearly always the feature's own, else the table says which. Must stay true: nothing is promised that
the driver does not carry out for a guest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import os_traits

PREFIX = "HW_CPU_X86_"
#: What every driver does.
COMMON = frozenset(
    {
        "COMPUTE_NODE",
        "COMPUTE_IMAGE_TYPE_QCOW2",
        "COMPUTE_IMAGE_TYPE_RAW",
        "COMPUTE_NET_ATTACH_INTERFACE",
    }
)
#: What a guest with shares needs of its host.
SHARES = frozenset({"COMPUTE_STORAGE_VIRTIO_FS", "COMPUTE_MEM_BACKING_FILE"})
#: What every driver does with volumes.
VOLUMES = frozenset(
    {
        "COMPUTE_RESCUE_BFV",
        "COMPUTE_VOLUME_ATTACH",
        "COMPUTE_VOLUME_ATTACH_WITH_TAG",
        "COMPUTE_VOLUME_EXTEND",
        "COMPUTE_VOLUME_MULTI_ATTACH",
    }
)
#: libvirt's name of a feature -> the ends of its traits, where they are called otherwise.
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
    """The traits of a processor with these features, as libvirt names them."""
    names = _names()
    found: set[str] = set()
    for feature in features:
        if feature in OTHER_NAMES:
            found.update(PREFIX + end for end in OTHER_NAMES[feature])
        elif (plain := _plain(feature)) in names:
            found.add(names[plain])
    return found


@functools.cache
def _names() -> dict[str, str]:
    return {_plain(trait.removeprefix(PREFIX)): trait for trait in os_traits.get_traits(PREFIX)}


def _plain(name: str) -> str:
    return re.sub("[^A-Z0-9]", "", name.upper())
