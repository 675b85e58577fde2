# SPDX-License-Identifier: Apache-2.0
"""Which PCI devices a flavor asks for.

A flavor names them by aliases, which only the API's configuration explains: the API resolves them when it freezes the
flavor into a server (``with_aliases``), under a key that nobody is shown; everybody else reads the resolved form.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from common.hardware.asked import Asked, refusal
from common.hardware.records import DeviceWish
from common.models import Flavor

ALIAS = "pci_passthrough:alias"
OWN = "kilonova:"          #: keys of extra specs that only we write
RESOLVED = OWN + "devices"
MOST = 64                  #: devices of one guest
_WISH = re.compile(r"\s*([^\s:=|,]{1,255}):([0-9]{1,4})\s*", re.ASCII)
_ANSWER = re.compile(r"([^:=|,]+)=([0-9a-f:|]+):([0-9]{1,4})", re.ASCII)


def wishes(text: str) -> list[tuple[str, int]]:
    """``name:count,...`` as (name, count). ValueError says what is wrong."""
    found = [_WISH.fullmatch(part) for part in text.split(",")]
    pairs = [(match[1], int(match[2])) for match in found if match]
    if len(pairs) != len(found) or not all(count for _, count in pairs) or sum(count for _, count in pairs) > MOST:
        raise ValueError(f"is not name:count, or several of these with commas between, of at most {MOST} devices")
    return pairs


def with_aliases(flavor: Flavor, aliases: Mapping[str, Sequence[tuple[str, str]]]) -> Flavor:
    """The flavor as it is frozen into a server: what it calls PCI devices explained.

    Args:
        aliases: name -> the kinds of devices, as (vendor, product), that it stands for.
    Raises:
        BadRequest: a name that is not configured.
    """
    specs = {key: value for key, value in flavor.extra_specs.items() if not key.startswith(OWN)}
    resolved = []
    for name, count in Asked(flavor, {}).spec(ALIAS, wishes) or ():
        if name not in aliases:
            raise refusal(ALIAS, f"{name[:80]!r} is not an alias that [api] pci_alias has.")
        kinds = "|".join(sorted({f"{vendor}:{product}" for vendor, product in aliases[name]}))
        resolved.append(f"{name}={kinds}:{count}")
    if resolved:
        specs[RESOLVED] = ",".join(resolved)
    return dataclasses.replace(flavor, extra_specs=specs)


def devices(asked: Asked) -> tuple[DeviceWish, ...]:
    """The PCI devices that a frozen flavor asks for."""
    if ALIAS in asked.specs and RESOLVED not in asked.specs:
        raise refusal(ALIAS, "its names are not explained; set [api] pci_alias.")
    return tuple(_wish(part) for part in asked.specs.get(RESOLVED, "").split(",") if part)


def _wish(text: str) -> DeviceWish:
    match = _ANSWER.fullmatch(text)
    if match is None:
        raise refusal(ALIAS, "its explanation cannot be read; resize the server to the flavor again.")
    kinds = tuple((vendor, product) for vendor, _, product in (kind.partition(":") for kind in match[2].split("|")))
    return DeviceWish(match[1], int(match[3]), kinds)
