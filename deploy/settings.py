# SPDX-License-Identifier: Apache-2.0
"""The settings that a running cloud was started with: none is turned into another cloud beneath its
guests.

Written by ``Cloud.launch`` when it starts a cloud, and compared by deploy/preflight.py. Facts that
no variable sets may change, and what they change is started again. Must stay true: no secret is
printed, for URLs may hold passwords.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple
from typing import TYPE_CHECKING

from deploy.configuration import write_secret

if TYPE_CHECKING:
    from deploy.cloud import Cloud

FILE, HIDDEN = "settings.json", "#"


def of(cloud: Cloud) -> dict[str, str]:
    """What each variable comes to in this cloud; of a URL, only what tells it from others."""
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
    """These are the ones that the processes are started with."""
    write_secret(cloud.run / FILE, json.dumps(of(cloud)))


def changed(cloud: Cloud) -> list[str]:
    """The variables that are others now than when this cloud was started, with their values then
    where these may be printed; none of a cloud that does not run."""
    path = cloud.run / FILE
    if cloud.supervisor() is None or not path.exists():
        return []
    now, then = of(cloud), json.loads(path.read_text())
    return [
        name if then[name].startswith(HIDDEN) else f"{name}={then[name]}"
        for name, value in now.items()
        if then.get(name, value) != value  # of an older release: as it was
    ]


def _digest(text: str | None) -> str:
    return HIDDEN + hashlib.sha256((text or "").encode()).hexdigest()
