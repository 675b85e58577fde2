# SPDX-License-Identifier: Apache-2.0
"""QoS limits and block sizes of a volume, from the connection data. Pure functions.

Called by ``connectors``. The QoS of a volume type is either applied or refused by name. Names that
neither QEMU nor Nova knows belong to the volume service's back end (consumer "both") and are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.xml.hardware_xml import VOLUME_LIMITS
from compute_agent.virt.volumes import VolumeLink

BLOCK_SIZES = ("logical_block_size", "physical_block_size")
MAX_RATE = 10**15
#: Limits of the block sizes that a guest can see, in bytes.
MIN_BLOCK, MAX_BLOCK = 512, 2 << 20
MAX, LENGTH, SIZE = "_max", "_max_length", "size_iops_sec"


def rates(volume_id: str, link: VolumeLink) -> dict[str, int]:
    """Return the limits of the volume's QoS, by libvirt's names. {} without QoS.

    Names that are not in ``VOLUME_LIMITS`` are ignored.

    Raises:
        VerbFailed: The QoS is not an object, a value is not a whole number up to ``MAX_RATE``, or
            QEMU cannot combine the limits.
    """
    specs = link.data.get("qos_specs") or {}
    if not isinstance(specs, Mapping):
        raise _refusal(volume_id, "qos_specs", "is not an object")
    limits = {
        name: _parse_number(volume_id, name, specs[name], MAX_RATE)
        for name in VOLUME_LIMITS
        if name in specs
    }
    for name, number in limits.items():
        if number:
            _check_combination(volume_id, name, limits)
    return limits


def block_sizes(volume_id: str, link: VolumeLink) -> dict[str, int]:
    """Return the block sizes in bytes that the guest sees, by libvirt's names.

    Sizes that the volume service does not give are left out.

    Raises:
        VerbFailed: A size is not a power of two from ``MIN_BLOCK`` to ``MAX_BLOCK``, or the
            physical size is less than the logical size.
    """
    sizes = {
        name: _parse_number(volume_id, name, link.data[name], MAX_BLOCK)
        for name in BLOCK_SIZES
        if link.data.get(name)
    }
    for name, number in sizes.items():
        if number < MIN_BLOCK or number & (number - 1):
            raise _refusal(
                volume_id, name, f"{number} is not a power of two of at least {MIN_BLOCK}"
            )
    logical, physical = (sizes.get(name, MIN_BLOCK) for name in BLOCK_SIZES)
    if BLOCK_SIZES[1] in sizes and physical < logical:
        raise _refusal(volume_id, BLOCK_SIZES[1], f"{physical} is less than {BLOCK_SIZES[0]}")
    return sizes


def _check_combination(volume_id: str, name: str, limits: Mapping[str, int]) -> None:
    """Raise VerbFailed if QEMU refuses the limit ``name`` together with the other limits.

    QEMU refuses a total limit beside a limit for reads or writes, a burst without an average or
    below the average, the length of a burst without the burst, and a request size without a limit
    of requests. A limit of 0 counts as missing.
    """
    if name.startswith("total"):
        for direction in ("read", "write"):
            other = name.replace("total", direction, 1)
            if limits.get(other):
                raise _refusal(volume_id, name, f"cannot be combined with the limit {other}")
    if name == SIZE:
        if not any(limits.get(f"{direction}_iops_sec") for direction in ("total", "read", "write")):
            raise _refusal(volume_id, name, "needs a limit of iops")
    elif name.endswith(LENGTH):
        if not limits.get(name.removesuffix("_length")):
            raise _refusal(volume_id, name, f"needs the limit {name.removesuffix('_length')}")
    elif name.endswith(MAX):
        average = name.removesuffix(MAX)
        if not limits.get(average):
            raise _refusal(volume_id, name, f"needs the limit {average}")
        if limits[name] < limits[average]:
            raise _refusal(volume_id, name, f"is less than {average}")


def _parse_number(volume_id: str, name: str, value: object, max_value: int) -> int:
    text = str(value).strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(max_value))):
        raise _refusal(volume_id, name, f"{text[:40]!r} is not a whole number")
    if int(text) > max_value:
        raise _refusal(volume_id, name, f"{text} is more than {max_value}")
    return int(text)


def _refusal(volume_id: str, name: str, why: str) -> VerbFailed:
    return VerbFailed(
        f"Hosts cannot apply the QoS of volume {volume_id}: {name} {why}. Change the QoS of the volume's "
        "type, or use another volume."
    )
