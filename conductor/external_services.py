# SPDX-License-Identifier: Apache-2.0
"""What the conductor asks of others: messages, images, networks, shares. The seams that
``conductor.saga.Engine`` has.

``conductor.service_clients`` and ``conductor.service`` implement them for the process. Each call of
the image, network and share service is made as Kilonova's own user. It raises Unavailable when the
service does not answer, and another Problem when the service refuses for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.json_types import JsonObject
from common.models import Command, ImageRef, Interface, RequestSpec, Selection


class Messaging(Protocol):
    """Messages to schedulers and hosts; any of them may be lost."""

    def select(self, specs: list[RequestSpec], fresh: bool) -> list[Selection]:
        """Ask a scheduler; raises NoAnswer."""

    def do(self, host: str, commands: list[Command]) -> None:
        """Send commands to a host."""

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        """Tell a host to fetch these images ahead."""


class ImageApi(Protocol):
    """The image service. Each call may be repeated."""

    def create(self, record: JsonObject) -> None:
        """Make an image record under the id it names; one that is there already is fine."""

    def show(self, image_id: str) -> ImageRef:
        """The image as it is now."""

    def delete(self, image_id: str) -> None:
        """Remove an image; one that is gone is fine."""

    def find(self, filters: dict[str, str]) -> list[JsonObject]:
        """Images with these properties, newest first."""


class NetworkApi(Protocol):
    """The network service. Ports are dicts as the service writes them."""

    def ports(self, server: str) -> list[JsonObject]:
        """The ports of a server."""

    def port(self, port_id: str) -> JsonObject:
        """One port; NotFound when it is gone."""

    def create(self, ports: Sequence[JsonObject]) -> list[JsonObject]:
        """Make ports, all or none. Not repeatable: look first whether they are there."""

    def update(self, port_id: str, values: JsonObject) -> JsonObject:
        """Change a port; NotFound when it is gone."""

    def delete(self, port_id: str) -> None:
        """Remove a port; one that is gone is fine."""

    def bind_also(self, port: JsonObject, host: str) -> JsonObject | None:
        """Bind a port (the whole of it) to this host too, inactively. The binding, with vif_type
        and vif_details; None where the service knows one host a port. NotFound when the port is
        gone."""

    def activate(self, port_id: str, host: str) -> None:
        """Make the binding to this host the active one; NotFound when it is gone."""

    def unbind_at(self, port_id: str, host: str) -> None:
        """Remove the inactive binding to this host; one that is gone is fine, the active one
        stays."""

    def names_guests(self) -> bool:
        """Does the service know ports by names, which guests resolve?"""

    def described(self, ports: Sequence[JsonObject], floating: bool) -> list[Interface]:
        """These ports with what their networks and subnets say; ``floating``: also which floating
        IPs lead to them, which none does to a port that was just made."""


class ShareApi(Protocol):
    """The shared file system service."""

    def allow(self, share_id: str, access_to: str) -> str:
        """Let an address mount a share; what is so already stays. The state of that rule: active,
        error or another."""

    def deny(self, share_id: str, access_to: str) -> None:
        """Remove that rule; one that is gone is fine."""
