# SPDX-License-Identifier: Apache-2.0
"""The context of workflow steps, pending cleanups and host actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from common.domain.clock import Clock
from common.security.vault import Vault
from common.store.engine import Store
from common.store.placement.allocations import FailedBuildLimit
from conductor.engine.external_services import ImageApi, Messaging, NetworkApi, ShareApi, VolumeApi


class Lane(StrEnum):
    """The queue in which an action waits for its step, with a thread of its own.

    A step that calls an external service or the fencing hook has the lane of that service or hook.
    All other steps have the lane INSIDE.
    """

    INSIDE = "inside"
    IMAGE = "image"
    NETWORK = "network"
    SHARE = "share"
    VOLUME = "volume"
    FENCING = "fencing"


@dataclass(frozen=True)
class Chore:
    """Periodic work of a conductor, which the sweep does every ``period`` seconds."""

    #: Does the work. Several conductors may call this at the same time.
    run: Callable[[Engine], object]
    #: Seconds between two rounds.
    period: float
    #: True if the work trusts the silence of hosts and the clock of the database.
    needs_certainty: bool = False


def ignore_wake(lane: Lane) -> None:
    """Do nothing. The default of ``Engine.wake``, if no thread waits for due actions."""


@dataclass
class Engine:
    """The database, the clients of other services, and the operator's options."""

    store: Store
    #: The clock of this machine.
    clock: Clock
    #: Sends commands to hosts, and requests to schedulers.
    messaging: Messaging
    #: Names this conductor in leases.
    owner: str
    #: The client of each external service. None: the cloud has no such service.
    images: ImageApi | None = None
    networks: NetworkApi | None = None
    shares: ShareApi | None = None
    volumes: VolumeApi | None = None
    #: Seals the secrets of actions and of connections to volumes.
    vault: Vault = field(default_factory=lambda: Vault(""))
    #: Returns when the guests of a host are certainly dead, otherwise raises a Problem.
    fence_host: Callable[[str], None] | None = None
    #: Called with a lane, after a commit that made an action due in that lane at once.
    wake: Callable[[Lane], None] = ignore_wake
    #: Hosts on which a server is tried.
    max_attempts: int = 3
    #: Seconds that a guest has to power off.
    shutdown_timeout: float = 60
    #: Seconds of silence after which a host counts as down.
    host_silence: int = 30
    #: Seconds for the rule that lets a host mount a share.
    share_timeout: int = 60
    #: Seconds for the creation of a server's volumes.
    volume_timeout: int = 600
    #: Seconds for the ports of a guest that starts. 0: do not wait.
    vif_plugging_timeout: int = 300
    #: True if the action fails when the ports are late.
    vif_plugging_is_fatal: bool = True
    #: When a host on which builds failed is left out.
    failed_build_limit: FailedBuildLimit = FailedBuildLimit()
    #: The availability zone of hosts in no other zone.
    default_zone: str = "nova"
    #: Seconds after which a shelved server leaves its host. 0: at once. Negative: never.
    shelved_offload_time: int = 0
    #: True if the host of a server is a candidate for its resize.
    allow_resize_to_same_host: bool = False
