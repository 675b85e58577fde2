# SPDX-License-Identifier: Apache-2.0
"""One request of the Compute API as its handlers see it.

Made by ``app.ComputeEndpoint``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from common.clients.image import Image
from common.domain import errors, states
from common.domain.clock import SECOND, parse
from common.domain.json_types import JsonObject
from common.store.engine import Connection
from common.store.rows import ServerRecord
from common.store.servers import actions
from common.store.tenants.quotas import Numbers
from compute_api.compute.request.dependencies import Services, TenantNetworks, TenantVolumes
from compute_api.compute.request.links import Links
from compute_api.http.request import ApiRequest
from compute_api.http.routing import ApiRoute


@dataclass(slots=True, kw_only=True)
class Request(ApiRequest):
    """What a handler is given."""

    services: Services
    route: ApiRoute
    links: Links
    headers: Mapping[str, str]
    _images: dict[str, Image] = field(default_factory=dict)

    def image(self, image_id: str) -> Image:
        """Return the image as the caller sees it; the service is asked once in a request.

        Raises:
            BadRequest: The caller may not see it, or there is none.
        """
        if image_id not in self._images:
            self._images[image_id] = self.services.images.show(image_id, self.context.token)
        return self._images[image_id]

    @property
    def networks(self) -> TenantNetworks | None:
        """The network service; None: this cloud has none, so its servers have no interfaces."""
        service = self.services.networks
        return service if service is not None and service.has_service() else None

    @property
    def volumes(self) -> TenantVolumes | None:
        """The volume service; None: this cloud has none."""
        service = self.services.volumes
        return service if service is not None and service.has_service() else None

    @property
    def is_admin(self) -> bool:
        """Sees every project's things."""
        return self.context.is_admin

    @property
    def scope(self) -> str | None:
        """The project whose things the caller sees; None: all."""
        return None if self.is_admin else self.context.project_id

    def allowed(self, rules: frozenset[str]) -> frozenset[str]:
        """Those of the rules that hold for the caller in their own project."""
        return frozenset(rule for rule in rules if self.policy.allows(rule, self.context))

    def limits(self) -> Numbers:
        """Those in force in the caller's project."""
        return self.read(self.services.quota.source(self.context.project_id))

    def check(self, action: states.Action, server: ServerRecord, *, waits: bool = False) -> None:
        """Refuse early what the server's state does not allow, before another service is asked.

        Args:
            waits: the request waits for its turn, so that another action in hand is no reason.
        Raises:
            Conflict: or a kind of it.
        """
        try:
            actions.check(action, server.id, server, self.context)
        except errors.Busy:
            if not waits:
                raise

    def begin(
        self,
        begin: Callable[..., str],
        rows: states.Action | Sequence[states.Action],
        server_id: str,
        **named: object,
    ) -> str:
        """Let an action take a server, by ``actions.begin`` or one that is called alike; returns
        its id."""
        is_begun: Callable[[Connection, str], bool] = partial(actions.is_begun, server_id=server_id)
        return self.make(
            is_begun, begin, rows, server_id, context=self.context, project_id=self.scope, **named
        )

    # --- the query ---
    def first(self, name: str) -> str | None:
        """A parameter's value; of several the last, as the API has it."""
        values = self.query.get(name)
        return values[-1] if values else None

    @property
    def parameters(self) -> Collection[str]:
        """The query parameters that the route has at this version."""
        return self.route.query.at(self.version).names if self.route.query else ()

    @property
    def changed(self) -> tuple[int | None, int | None]:
        """From when to when, in microseconds, something must have changed: changes-since and
        changes-before, as far as the version has them. What is shown with the second that
        changes-before names is in it."""
        known = self.parameters
        since, before = (
            parse(text) if name in known and (text := self.first(name)) is not None else None
            for name in ("changes-since", "changes-before")
        )
        if since is not None and before is not None and since > before:
            raise errors.BadRequest(
                "The value of changes-since must be less than or equal to changes-before."
            )
        return since, None if before is None else before // SECOND * SECOND + SECOND - 1

    @property
    def limit(self) -> int:
        """How many items the page may hold."""
        given = self.first("limit")
        most = self.services.settings.max_limit
        if given is None:
            return most
        if not given.isdecimal():
            raise errors.BadRequest("limit param must be an integer")
        return min(int(given[:10]), most)

    def page(self, name: str, path: str, items: Sequence[object], marker: str | None) -> JsonObject:
        """A list's body, with the link to the next page when this one is full."""
        body: JsonObject = {name: items}
        if items and len(items) == self.limit and marker is not None:
            body[f"{name}_links"] = self.links.next(path, self.query, marker)
        return body
