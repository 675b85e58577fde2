# SPDX-License-Identifier: Apache-2.0
"""The services that the API lists, under the names of Nova's binaries."""

from __future__ import annotations

from enum import StrEnum


class Binary(StrEnum):
    """The ``binary`` of a service. An agent is a compute service."""

    COMPUTE = "nova-compute"
    CONDUCTOR = "nova-conductor"
    SCHEDULER = "nova-scheduler"


#: The trait of a host whose compute service is disabled: the host takes no new servers.
COMPUTE_DISABLED = "COMPUTE_STATUS_DISABLED"
