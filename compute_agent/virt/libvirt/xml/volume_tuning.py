# SPDX-License-Identifier: Apache-2.0
"""Rates and block sizes that the volume service asks of a volume's consumer: pure functions.

Called by ``connectors``. The QoS of a volume type is either carried out or refused by name. Names
that are neither QEMU's nor Nova's belong to the service's back end (consumer "both") and are passed
over.
"""

from __future__ import annotations

from collections.abc import Mapping

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.xml.hardware_xml import VOLUME_LIMITS
from compute_agent.virt.volumes import VolumeLink

BLOCK_SIZES = ("logical_block_size", "physical_block_size")
MAX_RATE = 10**15
#: What a guest can be shown as the size of a block, in bytes.
MIN_BLOCK, MAX_BLOCK = 512, 2 << 20
MAX, LENGTH, SIZE = "_max", "_max_length", "size_iops_sec"


def rates(volume_id: str, link: VolumeLink) -> dict[str, int]:
    """Return the limits of the volume's QoS, by libvirt's names.

    Raises:
        VerbFailed: A value is no rate, or QEMU cannot combine the limits.
    """
    specs = link.data.get("qos_specs") or {}
    if not isinstance(specs, Mapping):
        raise _refusal(volume_id, "qos_specs", "is not an object")
    found = {
        name: _number(volume_id, name, specs[name], MAX_RATE)
        for name in VOLUME_LIMITS
        if name in specs
    }
    for name, number in found.items():
        if number:
            _check_combination(volume_id, name, found)
    return found


def block_sizes(volume_id: str, link: VolumeLink) -> dict[str, int]:
    """Return the block sizes that the guest is to see, by libvirt's names.

    Raises:
        VerbFailed: QEMU cannot show such blocks.
    """
    found = {
        name: _number(volume_id, name, link.data[name], MAX_BLOCK)
        for name in BLOCK_SIZES
        if link.data.get(name)
    }
    for name, number in found.items():
        if number < MIN_BLOCK or number & (number - 1):
            raise _refusal(volume_id, name, f"{number} is no power of two from {MIN_BLOCK} on")
    logical, physical = (found.get(name, MIN_BLOCK) for name in BLOCK_SIZES)
    if BLOCK_SIZES[1] in found and physical < logical:
        raise _refusal(volume_id, BLOCK_SIZES[1], f"{physical} is less than {BLOCK_SIZES[0]}")
    return found


def _check_combination(volume_id: str, name: str, found: Mapping[str, int]) -> None:
    """Refuse what QEMU refuses: a total beside one way, a burst without its rate or below it."""
    if name.startswith("total"):
        for way in ("read", "write"):
            other = name.replace("total", way, 1)
            if found.get(other):
                raise _refusal(volume_id, name, f"cannot be combined with {other}")
    if name == SIZE:
        if not any(found.get(f"{way}_iops_sec") for way in ("total", "read", "write")):
            raise _refusal(volume_id, name, "needs a limit of iops")
    elif name.endswith(LENGTH):
        if not found.get(name.removesuffix("_length")):
            raise _refusal(volume_id, name, f"needs {name.removesuffix('_length')}")
    elif name.endswith(MAX):
        average = name.removesuffix(MAX)
        if not found.get(average):
            raise _refusal(volume_id, name, f"needs {average}")
        if found[name] < found[average]:
            raise _refusal(volume_id, name, f"is less than {average}")


def _number(volume_id: str, name: str, value: object, most: int) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        raise _refusal(volume_id, name, f"{text[:40]!r} is not a whole number")
    if int(text) > most:
        raise _refusal(volume_id, name, f"{text} is more than {most}")
    return int(text)


def _refusal(volume_id: str, name: str, why: str) -> VerbFailed:
    return VerbFailed(
        f"No host can carry out the QoS of volume {volume_id}: {name} {why}. Change the QoS of its "
        "volume type, or take another volume."
    )
