# SPDX-License-Identifier: Apache-2.0
"""What the API is given: the store and its neighbours, as the narrowest interfaces that it uses.

``service.application`` builds the real ones after the fork; tests pass in-memory ones. Nothing in the API
reaches for a global.
"""
from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.clients.image import Image
from common.models import Access, Command, Interface
from common.store.engine import Store
from common.vault import Vault
from compute_api.creating import Creator
from compute_api.quota import Keystone, Missing, Quota


class Bell(Protocol):
    """Wakes a conductor; never blocks, never fails."""

    def ring(self, neighbours: bool = False) -> None: ...


class Agents(Protocol):
    """Speaks to hosts at once."""

    def query(self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10) -> dict[str, Any]:
        """Ask one; raises NoAnswer or the Problem that it answers with."""

    def do(self, host: str, commands: Sequence[Command], access: Access | None) -> bool:
        """Give it commands that the conductor repeats; False when they were lost."""


class Images(Protocol):
    """Looks images up; ``show``, with the caller's token, raises BadRequest for what is not there for them. The others
    take and tell records as the service has them; NotFound, Forbidden and BadRequest are its refusals."""

    def show(self, image_id: str, token: str) -> Image: ...

    def record(self, image_id: str, token: str) -> dict[str, Any]: ...

    def page(self, query: Mapping[str, str], token: str) -> list[dict[str, Any]]: ...

    def change(self, image_id: str, properties: Mapping[str, str | None], token: str) -> None:
        """Set these properties; None takes one out."""

    def delete(self, image_id: str, token: str) -> None: ...

    def url(self, image_id: str) -> str:
        """Where the image is."""


class Networks(Protocol):
    """Reads and changes the network service with the caller's token; records are as the service tells them. Raises
    Unavailable when it does not answer, NotFound, Forbidden, Conflict and BadRequest when it refuses."""

    def has_service(self) -> bool: ...

    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Those with these ids; without ids the project's own and the shared ones."""

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[dict[str, Any]]: ...

    def ports(self, token: str, **filters: Any) -> list[dict[str, Any]]: ...

    def port(self, token: str, port_id: str) -> dict[str, Any]: ...

    def ports_left(self, token: str, project_id: str) -> int:
        """How many more the project may have; -1: no limit."""

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[dict[str, Any]]:
        """The project's: id and name, or the whole of them with their rules."""

    def interfaces(self, token: str, server_id: str) -> list[Interface]: ...

    # what users could do there themselves; a noun is a collection's name in the service's URLs
    def records(self, token: str, noun: str, **filters: Any) -> list[dict[str, Any]]: ...

    def record(self, token: str, noun: str, record_id: str) -> dict[str, Any]: ...

    def create(self, token: str, noun: str, values: dict[str, Any]) -> dict[str, Any]: ...

    def update(self, token: str, noun: str, record_id: str, values: dict[str, Any]) -> dict[str, Any]: ...

    def delete(self, token: str, noun: str, record_id: str) -> None: ...


@dataclass(frozen=True)
class Settings:
    """The options that handlers need. default_schedule_zone: where servers go that name no zone. pci_aliases: what
    flavors call PCI devices, and their (vendor, product). answer_patience: seconds that an answer waits for a step;
    reclaim_interval: seconds that a deleted server can be restored; console_url: where browsers reach the console
    service; fencing: can the conductor make sure that a silent host's guests are dead? max_local_disks: most disks of a
    server that are on its host. unregistered: what Keystone's limits do not name. quota: this cloud's own defaults."""

    max_limit: int = 1000
    max_body: int = 1024 * 1024
    public_url: str | None = None
    default_zone: str = "nova"
    default_schedule_zone: str | None = None
    pci_aliases: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    threads: int = 16
    answer_patience: float = 30.0
    reclaim_interval: int = 0
    console_url: str = "http://127.0.0.1:6080"
    console_token_seconds: int = 600
    fencing: bool = False
    max_local_disks: int = 3
    unregistered: Missing = field(default_factory=Missing)
    quota: Mapping[str, int] = field(default_factory=lambda: {
        "instances": 10, "cores": 20, "ram": 51200, "metadata_items": 128, "key_pairs": 100, "server_groups": 10,
        "server_group_members": 10, "injected_files": 5, "injected_file_content_bytes": 10240,
        "injected_file_path_bytes": 255})


@dataclass
class Services:
    """Everything outside the API that it calls, and what its requests share.

    vault: seals passwords; None in a cloud without a key. networks: None where there is no network service, and so no
    server has an interface. keystone: whose limits are in force; None: our own. quota: the one door to limits.
    creator: the one door for new servers. query_slots: how many
    requests may wait for a host at a time, a quarter of the threads, so that silent hosts cannot stop the API.
    wait_slots: how many may wait for a step of their action, as many.
    """

    store: Store
    bell: Bell
    agents: Agents
    images: Images
    settings: Settings = field(default_factory=Settings)
    vault: Vault | None = None
    networks: Networks | None = None
    keystone: Keystone | None = None
    quota: Quota = field(init=False)
    creator: Creator = field(init=False)
    query_slots: threading.BoundedSemaphore = field(init=False)
    wait_slots: threading.BoundedSemaphore = field(init=False)

    def __post_init__(self) -> None:
        self.quota = Quota(self.settings.quota, self.keystone, self.settings.unregistered)
        self.creator = Creator(self.store, self.settings.quota)
        self.query_slots = threading.BoundedSemaphore(max(1, self.settings.threads // 4))
        self.wait_slots = threading.BoundedSemaphore(max(1, self.settings.threads // 4))
