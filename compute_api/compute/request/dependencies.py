# SPDX-License-Identifier: Apache-2.0
"""The dependencies of the API: the store and the other services, as narrow interfaces.

``service.application`` creates the real services after the fork. Tests pass in-memory services. The
API has no globals.
"""

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
    """Wakes a conductor. Calls neither block nor fail.

    ``service_calls`` also wakes the conductor's threads whose steps call external services.
    """

    def wake(self, service_calls: bool = False) -> None: ...


class HostAgents(Protocol):
    """Sends queries and commands directly to hosts."""

    def query(self, host: str, verb: str, arguments: JsonObject, timeout: float = 10) -> JsonObject:
        """Send a query to a host, and return the answer.

        Args:
            host: Name of the host.
            verb: Name of the query.
            arguments: Arguments of the query.
            timeout: Seconds to wait for the answer.

        Raises:
            NoAnswer: The host cannot be reached, or does not answer in time.
            Unavailable: There is no key for queries to the host, or the database does not answer.
            Problem: The host reports an error.
        """

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        """Send commands to a host. Return False if the broker does not take the message.

        Without a key of the host nothing is sent, and the result is False too. The answer to the
        host's next report contains commands that are lost or not sent, so callers need not repeat
        them.

        Args:
            host: Name of the host.
            commands: The commands.
            access: Access to external services for the commands, or None.
        """


class TenantImages(Protocol):
    """Access to the image service with the caller's token.

    ``show`` raises BadRequest if the image does not exist for the caller. The other methods use
    records in the format of the service, and raise NotFound, Forbidden and BadRequest as the
    service does.
    """

    def show(self, image_id: str, token: str) -> Image: ...

    def record(self, image_id: str, token: str) -> JsonObject: ...

    def page(self, query: Mapping[str, str], token: str) -> list[JsonObject]: ...

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        """Set these properties of an image. The value None removes a property."""

    def delete(self, image_id: str, token: str) -> None: ...

    def url(self, image_id: str) -> str:
        """Return the URL of the image's record at the image service."""


class TenantNetworks(Protocol):
    """Access to the network service with the caller's token, with records in the service's format.

    The methods raise Unavailable if the service does not answer, and NotFound, Forbidden, Conflict
    or BadRequest if the service refuses.
    """

    def has_service(self) -> bool: ...

    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[JsonObject]:
        """Return the networks with these ids that the token may see.

        Without ids return the networks of the project and the shared networks.
        """

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[JsonObject]: ...

    def ports(self, token: str, **filters: object) -> list[JsonObject]: ...

    def port(self, token: str, port_id: str) -> JsonObject: ...

    def ports_left(self, token: str, project_id: str) -> int:
        """Return the number of further ports that the quota allows, or -1 for no limit."""

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[JsonObject]:
        """Return the project's security groups: id and name, or if ``whole`` all fields."""

    def interfaces(self, token: str, server_id: str) -> list[Interface]: ...

    # Operations for proxies. ``resource`` is the name of a collection in the service's URLs.
    def records(self, token: str, resource: str, **filters: object) -> list[JsonObject]: ...

    def record(self, token: str, resource: str, record_id: str) -> JsonObject: ...

    def create(self, token: str, resource: str, values: JsonObject) -> JsonObject: ...

    def update(
        self, token: str, resource: str, record_id: str, values: JsonObject
    ) -> JsonObject: ...

    def delete(self, token: str, resource: str, record_id: str) -> None: ...


class TenantShares(Protocol):
    """Access to the shared file system service with the caller's token.

    ``share`` raises Unavailable if the service does not answer, and NotFound or Forbidden if the
    service refuses.
    """

    def has_service(self) -> bool: ...

    def share(self, token: str, share_id: str) -> Share: ...


class TenantVolumes(Protocol):
    """Access to the block storage service with the caller's token.

    The methods raise Unavailable if the service does not answer. Other errors are those of
    ``common.clients.volumes.VolumeClient``.
    """

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

    # Operations for proxies. ``resource`` is "volumes" or "snapshots".
    def records(self, token: str, resource: str) -> list[JsonObject]: ...

    def record(self, token: str, resource: str, record_id: str) -> JsonObject: ...

    def make(self, token: str, resource: str, values: JsonObject) -> JsonObject: ...

    def remove(self, token: str, resource: str, record_id: str) -> None: ...


@dataclass(frozen=True)
class ApiSettings:
    """The options of the configuration that handlers of the API need."""

    #: Maximum number of items on a page.
    max_limit: int = 1000
    max_body_bytes: int = 1024 * 1024
    #: Beginning of links. None means the address that the client used.
    public_url: str | None = None
    #: Zone of hosts outside all zone aggregates.
    default_zone: str = "nova"
    #: Zone of servers if the request contains no zone. None means any zone.
    default_schedule_zone: str | None = None
    #: Alias of PCI devices in flavors -> pairs of vendor and product.
    pci_aliases: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    #: Threads of this process, without those for requests that may wait.
    threads: int = 16
    #: Limit for the wait of a response for a step of its action.
    answer_timeout_seconds: float = 30.0
    #: Seconds in which a soft-deleted server can be restored. 0 deletes servers at once.
    reclaim_interval: int = 0
    #: URL of the console service for browsers.
    console_url: str = "http://127.0.0.1:6080"
    console_token_seconds: int = 600
    #: Beginning of the URLs of spice-direct consoles, or "" without such consoles.
    spice_direct_url: str = ""
    #: Whether conductors can fence silent hosts.
    fencing: bool = False
    #: Maximum number of disks that a server has on its host.
    max_local_disks: int = 3
    #: Whether servers may have volumes of another zone.
    cross_az_attach: bool = True
    #: Limits of resources that Keystone does not list.
    unregistered: UnregisteredLimits = field(default_factory=UnregisteredLimits)
    #: The default limits of this cloud.
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
    """The services that the API calls, and the state that requests share."""

    store: Store
    wakeup: Wakeup
    agents: HostAgents
    images: TenantImages
    settings: ApiSettings = field(default_factory=ApiSettings)
    #: Encrypts passwords. None in a cloud without a key.
    vault: Vault | None = None
    #: None without a network service. In this case servers have no interfaces.
    networks: TenantNetworks | None = None
    #: Client for Keystone's limits, or None for limits in this database.
    keystone: KeystoneLimits | None = None
    #: None without a shared file system service.
    shares: TenantShares | None = None
    #: None without a block storage service.
    volumes: TenantVolumes | None = None
    quota: Quota = field(init=False)
    creator: Creator = field(init=False)
    #: Slots of requests that wait for a host: half as many as threads, so that silent hosts cannot
    #: block the API.
    query_slots: threading.BoundedSemaphore = field(init=False)
    #: Slots of requests that wait for a step of their action, or for the end of another action.
    wait_slots: threading.BoundedSemaphore = field(init=False)
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.quota = Quota(self.settings.quota, self.keystone, self.settings.unregistered)
        self.creator = Creator(self.store, self.settings.quota)
        threads = self.settings.threads
        self.query_slots = threading.BoundedSemaphore(max(1, threads // 2))
        # The remaining threads serve requests to servers that need no wait.
        self.wait_slots = threading.BoundedSemaphore(
            max(1, threads * (waiting_threads.PER_THREAD - 1))
        )
        self.turns = Turns()
