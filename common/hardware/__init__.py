# SPDX-License-Identifier: Apache-2.0
"""What a flavor and an image say of a guest's hardware, understood once.

Pure. The API asks it to refuse what no host can carry out, placement what a server needs, the agent how the domain
looks: all three from the same frozen flavor and image properties, so they cannot disagree. docs/flavors.md has the
list of what is carried out.
"""
from __future__ import annotations

from collections.abc import Mapping

from common.hardware import options, placement, refused
from common.hardware.asked import Asked
from common.hardware.cells import cells, dedicated, pages
from common.hardware.devices import OWN as OWN_SPECS
from common.hardware.devices import devices, with_aliases
from common.hardware.placement import LOCAL_DISKS, OWN
from common.hardware.records import ANY, LARGE, NOT_ASKED, SMALL, CellWish, DeviceWish, Hardware
from common.hardware.topology import topology
from common.models import Flavor

__all__ = ["ANY", "LARGE", "LOCAL_DISKS", "NOT_ASKED", "OWN", "OWN_SPECS", "SMALL", "CellWish", "DeviceWish",
           "Hardware", "hardware", "resources", "traits", "with_aliases"]


def hardware(flavor: Flavor, properties: Mapping[str, str]) -> Hardware:
    """What this flavor and these image properties ask for.

    Raises:
        BadRequest: a value that makes no sense, or something that hosts cannot carry out; it names the extra spec or
            the property.
    """
    asked = Asked(flavor, properties)
    refused.check(asked)
    sockets, cores, threads_per_core = topology(asked)
    own, threads = dedicated(asked)
    page = pages(asked)
    return Hardware(sockets, cores, threads_per_core, cells(asked, bool(own or page), page), own, threads, page,
                    devices(asked), options.options(asked))


def resources(flavor: Flavor, properties: Mapping[str, str]) -> dict[str, int]:
    """Resource class -> amount that a server of this flavor and image holds of its host; no zeros.

    Raises:
        BadRequest: as ``hardware``.
    """
    return placement.resources(Asked(flavor, properties))


def traits(flavor: Flavor, properties: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The traits that a host must have, and those that it must not have, sorted. Raises BadRequest."""
    return placement.traits(Asked(flavor, properties))
