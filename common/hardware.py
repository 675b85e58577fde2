# SPDX-License-Identifier: Apache-2.0
"""What a flavor and an image say of a guest's hardware, understood once.

Pure. The API asks it to refuse what no host can carry out, placement what a server needs, the agent how the domain
looks: all three from the same frozen flavor and image properties, so they cannot disagree.
"""
from __future__ import annotations

from collections.abc import Mapping

from common.models import Flavor

#: Resource classes that a flavor's own fields speak of.
OWN = ("VCPU", "MEMORY_MB", "DISK_GB")


def resources(flavor: Flavor, properties: Mapping[str, str]) -> dict[str, int]:
    """Resource class -> amount that a server of this flavor and image holds of its host; no zeros."""
    amounts = dict(zip(OWN, (flavor.vcpus, flavor.memory_mb, flavor.disk_gb), strict=True))
    return {name: amount for name, amount in amounts.items() if amount}
