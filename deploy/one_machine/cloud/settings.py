# SPDX-License-Identifier: Apache-2.0
"""The settings with which a running cloud was started, and which may not change during the run.

deploy/one_machine/cloud/lifecycle.py writes them at the start of a cloud, and
deploy/one_machine/preflight.py compares them. Facts that no variable sets may change, and the
processes that they change are restarted. Invariant: no secret is printed, because URLs may contain
passwords.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple

from common.security import private_files
from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.cloud.process_control import find_supervisor

FILE, HIDDEN = "settings.json", "#"


def of(cloud: Cloud) -> dict[str, str]:
    """Return environment variable -> this cloud's value, for all settings.

    Values that may contain passwords are digests, which begin with ``HIDDEN``, and so is the value
    of KILONOVA_PORT_BASE.
    """
    return {
        "KILONOVA_NETWORKS": "yes" if cloud.has_networks else "no",
        "KILONOVA_VOLUMES": "yes" if cloud.volumes else "no",
        "KILONOVA_DRIVER": cloud.driver,
        "KILONOVA_HOSTS": str(len(cloud.hosts)),
        "KILONOVA_PORT_BASE": _digest(repr(astuple(cloud.ports))),
        "KILONOVA_TRANSPORT_URL": _digest(cloud.broker_url),
        "KILONOVA_DATABASE_URL": _digest(cloud.database_url),
    }


def remember(cloud: Cloud) -> None:
    """Write this cloud's settings to the file that ``find_changes`` reads."""
    private_files.replace(cloud.run / FILE, json.dumps(of(cloud)))


def find_changes(cloud: Cloud) -> list[str]:
    """Return the variables that changed since the running cloud was started.

    An item is ``NAME=former value``, or only ``NAME`` if the value is a digest. The list is empty
    if the cloud does not run, or if the file with the settings is missing. A variable without a
    stored value counts as unchanged, because an older release did not know the variable.
    """
    path = cloud.run / FILE
    if find_supervisor(cloud) is None or not path.exists():
        return []
    now, then = of(cloud), json.loads(path.read_text())
    return [
        name if then[name].startswith(HIDDEN) else f"{name}={then[name]}"
        for name, value in now.items()
        if then.get(name, value) != value
    ]


def _digest(text: str | None) -> str:
    return HIDDEN + hashlib.sha256((text or "").encode()).hexdigest()
