# SPDX-License-Identifier: Apache-2.0
"""Filters that depend on the image: what its properties want of a host, and which hosts are kept
for which images.

They are asked of rebuilds too: a server may not keep its host with an image that could not have
been started there.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from oslo_config import cfg
from oslo_utils import versionutils

from common.domain.json_types import JsonMapping
from common.domain.models import RequestSpec
from scheduler.filters.check import Check, Filter, of_facts
from scheduler.snapshot import Snapshot

#: Names of image properties that are as old as the image service -> the names they have today.
OLD_NAMES = {
    "architecture": "hw_architecture",
    "hypervisor_type": "img_hv_type",
    "vm_mode": "hw_vm_mode",
    "hypervisor_version_requires": "img_hv_requested_version",
    "owner_id": "img_owner_id",
    "vmware_ostype": "os_distro",
    "root_device_name": "img_root_device_name",
}
#: What else the values of these properties are called. The first is the one that hosts use.
OTHER_WORDS = {
    "hw_architecture": {
        "i386": "i686",
        "i486": "i686",
        "i586": "i686",
        "x86_32": "i686",
        "x86_32p": "i686",
        "amd64": "x86_64",
    },
    "img_hv_type": {"xapi": "xen"},
    "hw_vm_mode": {"pv": "xen", "hv": "hvm", "baremetal": "hvm"},
}


def properties(spec: RequestSpec) -> dict[str, str]:
    """The image's properties under today's names; architecture, hypervisor and mode in the words of
    hosts."""
    found = {
        OLD_NAMES[name]: value for name, value in spec.image_properties.items() if name in OLD_NAMES
    }
    found |= {name: value for name, value in spec.image_properties.items() if name not in OLD_NAMES}
    return found | {name: _word(name, found[name]) for name in OTHER_WORDS if name in found}


def _word(name: str, value: object) -> str:
    lower = str(value).lower()
    return OTHER_WORDS[name].get(lower, lower)


def image_properties(conf: cfg.ConfigOpts) -> Filter:
    """The host runs guests of the image's architecture, hypervisor and mode, in a version that the
    image accepts."""
    architecture = conf.scheduler.image_properties_default_architecture

    def ask(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        found = properties(spec)
        if architecture:
            found.setdefault("hw_architecture", _word("hw_architecture", architecture))
        wanted = [found[name] for name in OTHER_WORDS if found.get(name)]
        # then the version is not compared either: so Nova's images have always been read
        if not wanted:
            return
        yield Check(
            of_facts(snapshot, lambda facts: _runs(facts, wanted)),
            f"not made for guests with {', '.join(wanted)[:200]}",
        )
        version, bits = found.get("img_hv_requested_version"), found.get("hw_maxphysaddr_bits")
        if version:
            yield Check(
                of_facts(snapshot, lambda facts: _accepts(facts, version)),
                f"with a hypervisor whose version is not {version[:64]}",
            )
        if bits:
            yield Check(
                of_facts(snapshot, lambda facts: _addresses(facts, bits)),
                f"with physical addresses of fewer than {bits[:64]} bits",
            )

    return ask


def _runs(facts: JsonMapping, wanted: list[str]) -> bool:
    """Is one of the host's supported instances (architecture, hypervisor type, vm mode) all of
    this?"""
    return any(
        set(wanted) <= {str(word).lower() for word in supported}
        for supported in facts.get("supported_instances") or ()
    )


def _accepts(facts: JsonMapping, wanted: str) -> bool:
    version = facts.get("hypervisor_version")
    if not version:
        return True
    try:
        predicate = versionutils.VersionPredicate(wanted)
        return bool(predicate.satisfied_by(versionutils.convert_version_to_str(int(version))))
    except ValueError:  # the image's own words: they make no sense, so no version is what it wants
        return False


def _addresses(facts: JsonMapping, wanted: str) -> bool:
    has = ((facts.get("cpu_info") or {}).get("maxphysaddr") or {}).get("bits")
    try:
        return not has or int(has) >= int(wanted)
    except ValueError:
        return False


def isolated_hosts(conf: cfg.ConfigOpts) -> Filter:
    """``isolated_images`` run on ``isolated_hosts`` only; with the restriction these run nothing
    else."""
    hosts, images = tuple(conf.scheduler.isolated_hosts), frozenset(conf.scheduler.isolated_images)
    restricted = conf.scheduler.restrict_isolated_hosts_to_isolated_images

    def ask(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        isolated = np.zeros(len(snapshot.names), np.bool_)
        isolated[[snapshot.rows[name] for name in hosts if name in snapshot.rows]] = True
        if spec.image_id in images:
            yield Check(isolated, "not kept for this image")
        elif restricted:
            yield Check(~isolated, "kept for other images")

    return ask
