# SPDX-License-Identifier: Apache-2.0
"""Filters that depend on the image.

They compare the image's properties with the host, and apply reservations of hosts for images. They
also apply to rebuilds, because a server must not stay on a host that cannot run its new image.
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

#: Current name of each legacy image property.
OLD_NAMES = {
    "architecture": "hw_architecture",
    "hypervisor_type": "img_hv_type",
    "vm_mode": "hw_vm_mode",
    "hypervisor_version_requires": "img_hv_requested_version",
    "owner_id": "img_owner_id",
    "vmware_ostype": "os_distro",
    "root_device_name": "img_root_device_name",
}
#: Synonyms for values of these properties, and the word that hosts report.
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
    """Return the image's properties under their current names.

    Architecture, hypervisor type and VM mode are converted to the words that hosts report, in lower
    case. If a property has both names, the value of the current name is returned.
    """
    values = {
        OLD_NAMES[name]: value for name, value in spec.image_properties.items() if name in OLD_NAMES
    }
    values |= {
        name: value for name, value in spec.image_properties.items() if name not in OLD_NAMES
    }
    return values | {name: _normalize(name, values[name]) for name in OTHER_WORDS if name in values}


def _normalize(name: str, value: object) -> str:
    lower = str(value).lower()
    return OTHER_WORDS[name].get(lower, lower)


def image_properties(conf: cfg.ConfigOpts) -> Filter:
    """Require support for the image's architecture, hypervisor type and VM mode.

    If any of these is set, a required hypervisor version and address width are compared too. A host
    that does not report its version or width passes this comparison. An image without an
    architecture gets ``image_properties_default_architecture``, if configured.
    """
    architecture = conf.scheduler.image_properties_default_architecture

    def ask(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        image = properties(spec)
        if architecture:
            image.setdefault("hw_architecture", _normalize("hw_architecture", architecture))
        required = [image[name] for name in OTHER_WORDS if image.get(name)]
        # As in Nova, the version is only compared if another property is set.
        if not required:
            return
        yield Check(
            of_facts(snapshot, lambda facts: _supports(facts, required)),
            f"without support for guests with {', '.join(required)[:200]}",
        )
        version, bits = image.get("img_hv_requested_version"), image.get("hw_maxphysaddr_bits")
        if version:
            yield Check(
                of_facts(snapshot, lambda facts: _has_version(facts, version)),
                f"with a hypervisor whose version is not {version[:64]}",
            )
        if bits:
            yield Check(
                of_facts(snapshot, lambda facts: _has_address_bits(facts, bits)),
                f"with physical addresses of fewer than {bits[:64]} bits",
            )

    return ask


def _supports(facts: JsonMapping, required: list[str]) -> bool:
    """Return True if an entry of the fact ``supported_instances`` contains all these words."""
    return any(
        set(required) <= {str(word).lower() for word in supported}
        for supported in facts.get("supported_instances") or ()
    )


def _has_version(facts: JsonMapping, required: str) -> bool:
    version = facts.get("hypervisor_version")
    if not version:
        return True
    try:
        predicate = versionutils.VersionPredicate(required)
        return bool(predicate.satisfied_by(versionutils.convert_version_to_str(int(version))))
    except ValueError:
        # The image's requirement cannot be parsed, so no version meets it.
        return False


def _has_address_bits(facts: JsonMapping, required: str) -> bool:
    host_bits = ((facts.get("cpu_info") or {}).get("maxphysaddr") or {}).get("bits")
    try:
        return not host_bits or int(host_bits) >= int(required)
    except ValueError:
        return False


def isolated_hosts(conf: cfg.ConfigOpts) -> Filter:
    """Place ``isolated_images`` only on ``isolated_hosts``.

    With ``restrict_isolated_hosts_to_isolated_images`` these hosts run no other images.
    """
    hosts, images = tuple(conf.scheduler.isolated_hosts), frozenset(conf.scheduler.isolated_images)
    restricted = conf.scheduler.restrict_isolated_hosts_to_isolated_images

    def ask(snapshot: Snapshot, spec: RequestSpec) -> Iterable[Check]:
        isolated = np.zeros(len(snapshot.names), np.bool_)
        isolated[[snapshot.rows[name] for name in hosts if name in snapshot.rows]] = True
        if spec.image_id in images:
            yield Check(isolated, "not reserved for this image")
        elif restricted:
            yield Check(~isolated, "reserved for other images")

    return ask
