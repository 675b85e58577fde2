# SPDX-License-Identifier: Apache-2.0
"""What the API is given: the store and the other services, as the narrowest interfaces that it
uses.

``service.application`` builds the real ones after the fork; tests pass in-memory ones. The API has
no globals."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.clients.image import Image
from common.clients.shares import Share
from common.clients.volumes import Volume, VolumeSnapshot, VolumeType
from common.domain.json_types import JsonObject
from common.domain.models import Access, Command, Interface
from common.security.vault import Vault
from common.store.engine import Store
from compute_api.compute.request import waiting_threads
from compute_api.compute.request.creation import Creator
from compute_api.compute.request.quota import KeystoneLimits, Quota, UnregisteredLimits
from compute_api.compute.request.turns import Turns


class Wakeup(Protocol):
    """Wakes a conductor; never blocks, never fails."""

    def wake(self, neighbours: bool = False) -> None: ...


class HostAgents(Protocol):
    """Speaks to hosts at once."""

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        """Ask one; raises NoAnswer or the Problem that it answers with."""

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        """Give it commands that the conductor repeats; False when they were lost."""


class TenantImages(Protocol):
    """Looks images up; ``show``, with the caller's token, raises BadRequest for what is not there
    for them. The others take and tell records as the service has them; NotFound, Forbidden and
    BadRequest are its refusals."""

    def show(self, image_id: str, token: str) -> Image: ...

    def record(self, image_id: str, token: str) -> JsonObject: ...

    def page(self, query: Mapping[str, str], token: str) -> list[JsonObject]: ...

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        """Set these properties; None takes one out."""

    def delete(self, image_id: str, token: str) -> None: ...

    def url(self, image_id: str) -> str:
        """Where the image is."""


class TenantNetworks(Protocol):
    """Reads and changes the network service with the caller's token; records are as the service has
    them. Raises Unavailable when it does not answer, NotFound, Forbidden, Conflict and BadRequest
    when it refuses."""

    def has_service(self) -> bool: ...

    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[JsonObject]:
        """Those with these ids; without ids the project's own and the shared ones."""

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[JsonObject]: ...

    def ports(self, token: str, **filters: object) -> list[JsonObject]: ...

    def port(self, token: str, port_id: str) -> JsonObject: ...

    def ports_left(self, token: str, project_id: str) -> int:
        """How many more the project may have; -1: no limit."""

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[JsonObject]:
        """The project's: id and name, or the whole of them with their rules."""

    def interfaces(self, token: str, server_id: str) -> list[Interface]: ...

    # what users could do there themselves; a resource is a collection's name in the service's URLs
    def records(self, token: str, resource: str, **filters: object) -> list[JsonObject]: ...

    def record(self, token: str, resource: str, record_id: str) -> JsonObject: ...

    def create(self, token: str, resource: str, values: JsonObject) -> JsonObject: ...

    def update(
        self, token: str, resource: str, record_id: str, values: JsonObject
    ) -> JsonObject: ...

    def delete(self, token: str, resource: str, record_id: str) -> None: ...


class TenantShares(Protocol):
    """Looks shares up with the caller's token; raises Unavailable, and NotFound or Forbidden as the
    service does."""

    def has_service(self) -> bool: ...

    def share(self, token: str, share_id: str) -> Share: ...


class TenantVolumes(Protocol):
    """Looks volumes up, and makes and deletes them, with the caller's token; raises Unavailable,
    and what the service refuses as ``VolumeClient`` does."""

    def has_service(self) -> bool: ...

    def volume(self, token: str, volume_id: str) -> Volume: ...

    def snapshot(self, token: str, snapshot_id: str) -> VolumeSnapshot: ...

    def make_snapshot(self, token: str, volume_id: str, name: str) -> VolumeSnapshot: ...

    def delete_snapshot(self, token: str, snapshot_id: str) -> None: ...

    def types(self, token: str) -> list[VolumeType]: ...

    def create(
        self,
        token: str,
        *,
        size_gb: int,
        name: str = "",
        image_id: str | None = None,
        snapshot_id: str | None = None,
        volume_type: str | None = None,
        zone: str | None = None,
    ) -> Volume: ...

    def delete(self, token: str, volume_id: str) -> None: ...

    # what users could do there themselves; a resource is "volumes" or "snapshots"
    def records(self, token: str, resource: str) -> list[JsonObject]: ...

    def record(self, token: str, resource: str, record_id: str) -> JsonObject: ...

    def make(self, token: str, resource: str, values: JsonObject) -> JsonObject: ...

    def remove(self, token: str, resource: str, record_id: str) -> None: ...


@dataclass(frozen=True)
class ApiSettings:
    """The options that handlers need."""

    max_limit: int = 1000  #: items of a page
    max_body_bytes: int = 1024 * 1024
    public_url: str | None = None  #: what links begin with; None: as the client reached us
    default_zone: str = "nova"  #: of hosts that are in no zone
    default_schedule_zone: str | None = None  #: where servers go that name no zone
    #: what flavors call PCI devices -> their (vendor, product)
    pci_aliases: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    threads: int = 16  #: of this process
    answer_timeout_seconds: float = 30.0  #: that an answer waits for a step of its action
    reclaim_interval: int = 0  #: seconds that a deleted server can be restored
    console_url: str = "http://127.0.0.1:6080"  #: where browsers reach the console service
    console_token_seconds: int = 600
    #: what URLs of spice-direct consoles begin with; "": there are none
    spice_direct_url: str = ""
    fencing: bool = False  #: can conductors make sure that a silent host's guests are dead?
    max_local_disks: int = 3  #: of one server, on its host
    cross_az_attach: bool = True  #: may servers have volumes of another zone?
    #: limits of what Keystone does not name
    unregistered: UnregisteredLimits = field(default_factory=UnregisteredLimits)
    #: this cloud's default limits
    quota: Mapping[str, int] = field(
        default_factory=lambda: {
            "instances": 10,
            "cores": 20,
            "ram": 51200,
            "metadata_items": 128,
            "key_pairs": 100,
            "server_groups": 10,
            "server_group_members": 10,
            "injected_files": 5,
            "injected_file_content_bytes": 10240,
            "injected_file_path_bytes": 255,
        }
    )


@dataclass
class Services:
    """Everything outside the API that it calls, and what its requests share."""

    store: Store
    wakeup: Wakeup
    agents: HostAgents
    images: TenantImages
    settings: ApiSettings = field(default_factory=ApiSettings)
    vault: Vault | None = None  #: encrypts passwords; None in a cloud without a key
    #: None: there is no network service, so no server has an interface
    networks: TenantNetworks | None = None
    #: whose limits are in force; None: those of our database
    keystone: KeystoneLimits | None = None
    shares: TenantShares | None = None  #: None: there is no shared file system service
    volumes: TenantVolumes | None = None  #: None: there is no block storage service
    quota: Quota = field(init=False)  #: where all limits are read
    creator: Creator = field(init=False)  #: makes all new servers
    #: requests that may wait for a host at a time: half as many as threads, so that silent hosts
    #: cannot stop the API
    query_slots: threading.BoundedSemaphore = field(init=False)
    #: requests that may wait for a step of their action, or for their turn at a server
    wait_slots: threading.BoundedSemaphore = field(init=False)
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.quota = Quota(self.settings.quota, self.keystone, self.settings.unregistered)
        self.creator = Creator(self.store, self.settings.quota)
        threads = self.settings.threads
        self.query_slots = threading.BoundedSemaphore(max(1, threads // 2))
        # The other waiting threads are left to requests that do not wait.
        self.wait_slots = threading.BoundedSemaphore(
            max(1, threads * (waiting_threads.PER_THREAD - 1))
        )
        self.turns = Turns()
