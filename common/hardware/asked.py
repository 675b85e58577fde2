# SPDX-License-Identifier: Apache-2.0
"""What a flavor and an image ask for, side by side, and who decides between them.

Used by the other modules of ``common.hardware``. The one rule: what the flavor says an image may repeat or leave out,
not change. Every refusal names the extra spec or the image property that it is about.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from common import errors
from common.models import Flavor

Value = TypeVar("Value")
_SHOWN = 80          # letters of a refused value


def refusal(name: str, why: str) -> errors.BadRequest:
    """The 400 about this extra spec or image property."""
    return errors.BadRequest(f"{name[:_SHOWN]}: {why}")


def read(name: str, text: str, parse: Callable[[str], Value]) -> Value:
    """What the text means. Raises BadRequest that names it and says what is wrong."""
    try:
        return parse(str(text))
    except ValueError as problem:
        raise refusal(name, f"{str(text)[:_SHOWN]!r} {problem}.") from problem


class Asked:
    """The extra specs of a flavor and the properties of an image."""

    def __init__(self, flavor: Flavor, properties: Mapping[str, str]) -> None:
        self.flavor, self.specs, self.properties = flavor, flavor.extra_specs, properties

    def spec(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """What the flavor says; None: nothing."""
        return read(name, self.specs[name], parse) if name and name in self.specs else None

    def image(self, name: str, parse: Callable[[str], Value]) -> Value | None:
        """What the image says; None: nothing."""
        return read(name, self.properties[name], parse) if name and name in self.properties else None

    def agreed(self, spec: str, name: str, parse: Callable[[str], Value]) -> Value | None:
        """What both say, or the one that says something."""
        flavors, images = self.spec(spec, parse), self.image(name, parse)
        if flavors is not None and images is not None and flavors != images:
            raise refusal(name, f"the flavor's {spec} says {self.specs[spec][:_SHOWN]!r}, and an image cannot change "
                                "it; use another flavor or another image.")
        return images if flavors is None else flavors
