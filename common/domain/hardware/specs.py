# SPDX-License-Identifier: Apache-2.0
"""The records of requested hardware, the parsers of values, and the rule between flavor and image.

Used by the other modules of ``common.domain.hardware``, and by the API's check of extra specs.
Tenants write image properties, so every text is bounded before parsing. An image may repeat the
flavor's values or leave them out, but not change them. Every refusal names the extra spec or image
property.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from common.domain import errors
from common.domain.models import Flavor

Value = TypeVar("Value")
# The number of characters that an error shows of a refused value.
_SHOWN = 80
#: Values of ``Hardware.page_kb`` that are no size in KiB, and the smallest size.
NOT_ASKED, LARGE, ANY, SMALL = 0, -1, -2, 4


@dataclass(frozen=True, slots=True)
class NumaNodeRequest:
    """A requested NUMA node of the guest: its CPUs (guest numbers) and memory."""

    cpus: tuple[int, ...]
    memory_mb: int


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A request for ``count`` PCI devices, each of any of these (vendor, product) kinds."""

    name: str
    count: int
    kinds: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The requested hardware of a guest."""

    #: Sockets, cores and threads are all positive, or all 0 if not requested.
    sockets: int = 0
    cores: int = 0
    threads_per_core: int = 0
    #: If there are any, each is placed on a NUMA node of the host.
    numa_nodes: tuple[NumaNodeRequest, ...] = ()
    #: Guest CPUs that have a host CPU each.
    dedicated: frozenset[int] = frozenset()
    #: Thread policy: "", prefer, isolate or require.
    threads: str = ""
    #: KiB of a page, NOT_ASKED, LARGE (any but the smallest) or ANY.
    page_kb: int = NOT_ASKED
    devices: tuple[DeviceRequest, ...] = ()
    #: See docs/flavors.md.
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_assignment(self) -> bool:
        """True if the guest has NUMA nodes, dedicated CPUs or devices, which the claim assigns."""
        return bool(self.numa_nodes or self.dedicated or self.devices)


# More than any guest has. Larger requests are refused before they are processed.
MAX_CPUS, MAX_NUMA_NODES = 1024, 64
_LONGEST = 4096
TRUE = frozenset(("true", "1", "on", "yes", "t", "y"))
FALSE = frozenset(("false", "0", "off", "no", "f", "n"))
_PAGES = {"small": 4, "large": -1, "any": -2}
_UNITS = {"": 0, "k": 10, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"([0-9]{1,12})([kKMGT]?)i?(b|bit|B|)", re.ASCII)


def whole(least: int = 0, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a parser of whole numbers in this range, which raises ValueError for other texts."""

    def read(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,19}", text.strip(), re.ASCII):
            raise ValueError("is not a whole number")
        number = int(text)
        if not least <= number <= most:
            raise ValueError(f"is not between {least} and {most}")
        return number

    return read


def truth(text: str) -> bool:
    """Parse a boolean. The words of TRUE and FALSE are accepted in any case.

    Raises:
        ValueError: The text is another word.
    """
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError("is neither true nor false")
    return word in TRUE


def one_of(*words: str) -> Callable[[str], str]:
    """Return a parser that accepts these words in any case, and returns them in lower case.

    The parser raises ValueError for other words.
    """

    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"is not one of {', '.join(words)}")
        return word

    return read


def cpus(text: str) -> frozenset[int]:
    """Parse CPU numbers like ``0-3,^2,8``, where ``^`` excludes.

    Raises:
        ValueError: The text is malformed or too long, or a number is not below ``MAX_CPUS``.
    """
    included: set[int] = set()
    excluded: set[int] = set()
    for part in text[: _LONGEST + 1].split(","):
        match = re.fullmatch(r"\s*(\^?)([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part, re.ASCII)
        if match is None or len(text) > _LONGEST:
            raise ValueError("is not a list of CPUs like 0-3,^2,8")
        first, last = int(match[2]), int(match[3] or match[2])
        if last < first or last >= MAX_CPUS:
            raise ValueError(f"is not a list of CPUs below {MAX_CPUS}")
        (excluded if match[1] else included).update(range(first, last + 1))
    return frozenset(included - excluded)


def page_kb(text: str) -> int:
    """Parse a page size into KiB, or into SMALL (4 KiB), LARGE or ANY. Without a unit: KiB.

    Raises:
        ValueError: The text is malformed, or the size is not a power of two from 4 KiB to 1 TiB.
    """
    if text.strip().lower() in _PAGES:
        return _PAGES[text.strip().lower()]
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not small, large, any, or a size like 2MB")
    number, unit, ends = int(match[1]), match[2], match[3]
    size = number << (_UNITS[unit] if unit or ends else 10)  # a bare number is KiB
    size, rest = divmod(size, 8) if ends in ("b", "bit") else (size, 0)
    if rest or size < 4 << 10 or size & (size - 1) or size > 1 << 40:
        raise ValueError("is not the size of memory pages")
    return size >> 10


# --- extra specs and properties, side by side ---
def refusal(name: str, why: str) -> errors.BadRequest:
    """Return the error that refuses this extra spec or image property. The caller raises it."""
    return errors.BadRequest(f"{name[:_SHOWN]}: {why}")


def read(name: str, text: str, parse: Callable[[str], Value]) -> Value:
    """Parse the text of an extra spec or image property.

    Raises:
        BadRequest: The text is invalid. The error names the extra spec or property.
    """
    try:
        return parse(str(text))
    except ValueError as problem:
        raise refusal(name, f"{str(text)[:_SHOWN]!r} {problem}.") from problem


class HardwareSpecs:
    """The extra specs of a flavor and the properties of an image."""

    def __init__(self, flavor: Flavor, properties: Mapping[str, str]) -> None:
        self.flavor, self.specs, self.properties = flavor, flavor.extra_specs, properties

    def spec(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """Return the parsed extra spec of the flavor, or None if the flavor does not have it.

        Raises:
            BadRequest: The value is invalid.
        """
        return read(name, self.specs[name], parse) if name and name in self.specs else None

    def image(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """Return the parsed property of the image, or None if the image does not have it.

        Raises:
            BadRequest: The value is invalid.
        """
        return (
            read(name, self.properties[name], parse) if name and name in self.properties else None
        )

    def combine(self, spec: str, name: str, parse: Callable[[str], Value]) -> Value | None:
        """Return the value of the flavor or of the image, or None if neither has one.

        Args:
            spec: The name of the extra spec, or "".
            name: The name of the image property, or "".
            parse: The parser of both.

        Raises:
            BadRequest: A value is invalid, or both have values and these differ.
        """
        flavors, images = self.spec(spec, parse), self.image(name, parse)
        if flavors is not None and images is not None and flavors != images:
            raise refusal(
                name,
                f"the flavor's {spec} is {self.specs[spec][:_SHOWN]!r}, and the image has another value; use "
                "another flavor or another image.",
            )
        return images if flavors is None else flavors
