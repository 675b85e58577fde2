# SPDX-License-Identifier: Apache-2.0
"""How many sockets, cores and threads the guest's CPUs look like.

Pure. As in Nova numbers are wishes and maximums are limits: of the topologies that have exactly the flavor's CPUs, the
one that meets most wishes; among equals the one with most sockets.
"""
from __future__ import annotations

from common.hardware.asked import Asked, refusal
from common.hardware.values import MOST_CPUS, whole

KINDS = ("sockets", "cores", "threads")
_NUMBER = whole(1, 65536)


def topology(asked: Asked) -> tuple[int, int, int]:
    """(sockets, cores of each, threads of each); zeros when neither flavor nor image asks.

    Raises:
        BadRequest: no topology with the flavor's CPUs is within the limits.
    """
    limits = [_limit(asked, kind) for kind in KINDS]
    flavors = [asked.spec(f"hw:cpu_{kind}", _NUMBER) for kind in KINDS]
    images = [asked.image(f"hw_cpu_{kind}", _NUMBER) for kind in KINDS]
    wishes = flavors if any(flavors) else images
    if not any(wishes) and not any(limits):
        return 0, 0, 0
    for kind, wish, limit in zip(KINDS, wishes, limits, strict=True):
        if wish and limit and wish > limit:
            raise refusal(f"hw:cpu_{kind}" if any(flavors) else f"hw_cpu_{kind}",
                          f"{wish} is more than the limit, which is {limit}.")
    vcpus = asked.flavor.vcpus
    if vcpus > MOST_CPUS:
        raise refusal("hw:cpu_sockets", f"a topology has at most {MOST_CPUS} CPUs.")
    possible = [found for found in _topologies(vcpus)
                if all(not limit or number <= limit for number, limit in zip(found, limits, strict=True))]
    if not possible:
        raise refusal(_first_limit(asked), f"the flavor's {vcpus} CPUs cannot be divided within the limits.")
    return max(possible, key=lambda found: (sum(map(int.__eq__, found, (wish or 0 for wish in wishes))), found))


def _limit(asked: Asked, kind: str) -> int | None:
    spec, name = f"hw:max_cpu_{kind}", f"hw_cpu_max_{kind}"
    flavors, images = asked.spec(spec, _NUMBER), asked.image(name, _NUMBER)
    if flavors and images and images > flavors:
        raise refusal(name, f"{images} is more than the flavor's {spec} allows, which is {flavors}.")
    return images or flavors


def _first_limit(asked: Asked) -> str:
    names = [name for kind in KINDS for name in (f"hw:max_cpu_{kind}", f"hw_cpu_max_{kind}")]
    return next((name for name in names if name in asked.specs or name in asked.properties), names[0])


def _topologies(vcpus: int) -> list[tuple[int, int, int]]:
    divisors = [number for number in range(1, vcpus + 1) if vcpus % number == 0]
    return [(sockets, cores, vcpus // sockets // cores) for sockets in divisors for cores in divisors
            if vcpus // sockets % cores == 0]
