# SPDX-License-Identifier: Apache-2.0
"""What a flavor and an image ask of a guest's hardware: the records of it, the texts, and who
decides between the two.

Used by the other modules of ``common.domain.hardware``, and its parsers by the API's check of
extra specs. A tenant writes image properties, so every text is bounded before it is read. The one
rule: what the flavor says an image may repeat or leave out, not change. Every refusal names the
extra spec or the image property that it is about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from common.domain import errors
from common.domain.models import Flavor

Value = TypeVar("Value")
_SHOWN = 80  # letters of a refused value
#: What ``Hardware.page_kb`` says beside a size in KiB.
NOT_ASKED, LARGE, ANY, SMALL = 0, -1, -2, 4


@dataclass(frozen=True, slots=True)
class NumaNodeRequest:
    """A NUMA node that the guest shall have: its CPUs (guest numbers) and memory."""

    cpus: tuple[int, ...]
    memory_mb: int


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """``count`` PCI devices, each any of these (vendor, product)."""

    name: str
    count: int
    kinds: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the guest shall have.

    sockets, cores, threads_per_core: all three, or 0 when nobody asked. numa_nodes: with one or
    more the guest has a place on its host's NUMA nodes. dedicated: guest CPUs that have a host CPU
    each for themselves. threads: "", prefer, isolate or require. page_kb: 0 nothing asked, -1 any
    larger than the smallest, -2 any, else that size. options: see docs/flavors.md.
    """

    sockets: int = 0
    cores: int = 0
    threads_per_core: int = 0
    numa_nodes: tuple[NumaNodeRequest, ...] = ()
    dedicated: frozenset[int] = frozenset()
    threads: str = ""
    page_kb: int = NOT_ASKED
    devices: tuple[DeviceRequest, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_assignment(self) -> bool:
        """Does the guest hold particular parts of its host?"""
        return bool(self.numa_nodes or self.dedicated or self.devices)


# --- values: one function for each kind; each raises ValueError whose text says what is wrong ---
#: More than any guest has; what is asked beyond is refused before anything is made of it.
MAX_CPUS, MAX_NUMA_NODES = 1024, 64
_LONGEST = 4096
TRUE = frozenset(("true", "1", "on", "yes", "t", "y"))
FALSE = frozenset(("false", "0", "off", "no", "f", "n"))
_PAGES = {"small": 4, "large": -1, "any": -2}
_UNITS = {"": 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"([0-9]{1,12})([kKMGT]?)i?(b|bit|B|)", re.ASCII)


def whole(least: int = 0, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A whole number in decimal digits."""

    def read(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,19}", text.strip(), re.ASCII):
            raise ValueError("is not a whole number")
        number = int(text)
        if not least <= number <= most:
            raise ValueError(f"is not between {least} and {most}")
        return number

    return read


def truth(text: str) -> bool:
    """A boolean."""
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError("is neither true nor false")
    return word in TRUE


def one_of(*words: str) -> Callable[[str], str]:
    """One of these words, in any case."""

    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"is not one of {', '.join(words)}")
        return word

    return read


def cpus(text: str) -> frozenset[int]:
    """CPU numbers as ``0-3,^2,8``; ``^`` takes away."""
    given: tuple[set[int], set[int]] = (set(), set())
    for part in text[: _LONGEST + 1].split(","):
        match = re.fullmatch(r"\s*(\^?)([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part, re.ASCII)
        if match is None or len(text) > _LONGEST:
            raise ValueError("is not a list of CPUs like 0-3,^2,8")
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first or last >= MAX_CPUS:
            raise ValueError(f"is not a list of CPUs below {MAX_CPUS}")
        given[bool(match[1])].update(range(first, last + 1))
    return frozenset(given[0] - given[1])


def page_kb(text: str) -> int:
    """A page size in KiB; small, large and any as ``Hardware.page_kb`` has them."""
    if text.strip().lower() in _PAGES:
        return _PAGES[text.strip().lower()]
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not small, large, any, or a size like 2MB")
    number, unit, ends = int(match[1]), match[2], match[3]
    size = number << (_UNITS[unit] if unit or ends else 10)  # a bare number is KiB
    size = (size // 8 if ends in ("b", "bit") else size) >> 10
    if size < 4 or size & (size - 1) or size > 1 << 30:
        raise ValueError("is not the size of memory pages")
    return size


# --- extra specs and properties, side by side ---
def refusal(name: str, why: str) -> errors.BadRequest:
    """The 400 about this extra spec or image property."""
    return errors.BadRequest(f"{name[:_SHOWN]}: {why}")


def read(name: str, text: str, parse: Callable[[str], Value]) -> Value:
    """What the text means. Raises BadRequest that names it and says what is wrong."""
    try:
        return parse(str(text))
    except ValueError as problem:
        raise refusal(name, f"{str(text)[:_SHOWN]!r} {problem}.") from problem


class HardwareSpecs:
    """The extra specs of a flavor and the properties of an image."""

    def __init__(self, flavor: Flavor, properties: Mapping[str, str]) -> None:
        self.flavor, self.specs, self.properties = flavor, flavor.extra_specs, properties

    def spec(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """What the flavor says; None: nothing."""
        return read(name, self.specs[name], parse) if name and name in self.specs else None

    def image(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """What the image says; None: nothing."""
        return (
            read(name, self.properties[name], parse) if name and name in self.properties else None
        )

    def agreed(self, spec: str, name: str, parse: Callable[[str], Value]) -> Value | None:
        """What both say, or the one that says something."""
        flavors, images = self.spec(spec, parse), self.image(name, parse)
        if flavors is not None and images is not None and flavors != images:
            raise refusal(
                name,
                f"the flavor's {spec} says {self.specs[spec][:_SHOWN]!r}, and an image cannot change "
                "it; use another flavor or another image.",
            )
        return images if flavors is None else flavors
