# SPDX-License-Identifier: Apache-2.0
"""The request that ``app.ComputeEndpoint`` passes to the handlers of the Compute API."""

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
    """A checked request, with the services that the handler may use."""

    services: Services
    route: ApiRoute
    links: Links
    headers: Mapping[str, str]
    _images: dict[str, Image] = field(default_factory=dict)

    def image(self, image_id: str) -> Image:
        """Return the image as the caller sees it. A request reads each image only once.

        Raises:
            BadRequest: The image does not exist for the caller.
            Forbidden: Kilonova's own user cannot read the image, so hosts could not download it.
            Unavailable: The image service does not answer.
        """
        if image_id not in self._images:
            self._images[image_id] = self.services.images.show(image_id, self.context.token)
        return self._images[image_id]

    @property
    def networks(self) -> TenantNetworks | None:
        """The network service, or None in a cloud without a network service.

        Raises:
            Unavailable: The service catalogue cannot be read.
        """
        service = self.services.networks
        return service if service is not None and service.has_service() else None

    @property
    def volumes(self) -> TenantVolumes | None:
        """The block storage service, or None in a cloud without a block storage service.

        Raises:
            Unavailable: The service catalogue cannot be read.
        """
        service = self.services.volumes
        return service if service is not None and service.has_service() else None

    @property
    def is_admin(self) -> bool:
        """True if the caller is an administrator, with access to the resources of all projects."""
        return self.context.is_admin

    @property
    def scope(self) -> str | None:
        """The project to which the caller's access is limited, or None for all projects."""
        return None if self.is_admin else self.context.project_id

    def allowed(self, rules: frozenset[str]) -> frozenset[str]:
        """Return the policy rules of ``rules`` that allow the caller to act in its own project."""
        return frozenset(rule for rule in rules if self.policy.allows(rule, self.context))

    def limits(self) -> Numbers:
        """Return the limits of the caller's project.

        Raises:
            Unavailable: The limits are in Keystone, and Keystone does not answer.
        """
        return self.read(self.services.quota.source(self.context.project_id))

    def check(self, action: states.Action, server: ServerRecord, *, waits: bool = False) -> None:
        """Check early that the server allows the action, before requests to other services.

        Args:
            action: The row of the action.
            server: The row of the server.
            waits: Whether the request waits for a running action, which then is no error.

        Raises:
            Conflict: The server does not allow the action, for example because of its state, a lock
                or a running action. This is often a subclass, for example WrongState.
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
        """Begin an action on a server, and return the id of the action.

        Args:
            begin: ``actions.begin``, or a function with the same parameters.
            rows: The action, or several rows. The first row that allows the server's vm_state
                applies.
            server_id: Id of the server.
            named: Further arguments of ``begin``.

        Raises:
            NotFound: The server does not exist for the caller.
            Conflict: The server does not allow the action, for example because of its state, a lock
                or a running action.
        """
        is_begun: Callable[[Connection, str], bool] = partial(actions.is_begun, server_id=server_id)
        return self.make(
            is_begun, begin, rows, server_id, context=self.context, project_id=self.scope, **named
        )

    # --- the query ---
    @property
    def parameters(self) -> Collection[str]:
        """The names of the query parameters that the route has at this version."""
        return self.route.query.at(self.version).names if self.route.query else ()

    @property
    def changed(self) -> tuple[int | None, int | None]:
        """The values of changes-since and changes-before, in microseconds since 1970.

        A value is None if the parameter is missing, or unknown at this microversion. The time of
        changes-before is inclusive: the result is the end of the second.

        Raises:
            BadRequest: changes-since is later than changes-before.
        """
        parameters = self.parameters
        since, before = (
            parse(text)
            if name in parameters and (text := self.query_value(name)) is not None
            else None
            for name in ("changes-since", "changes-before")
        )
        if since is not None and before is not None and since > before:
            raise errors.BadRequest(
                "The value of changes-since must be less than or equal to changes-before."
            )
        return since, None if before is None else before // SECOND * SECOND + SECOND - 1

    @property
    def limit(self) -> int:
        """The maximum number of items on a page, which can be 0.

        The configured maximum applies to larger values, and without the parameter ``limit``.

        Raises:
            BadRequest: The parameter ``limit`` is not a number, or is negative.
        """
        text = self.query_value("limit")
        most = self.services.settings.max_limit
        if text is None:
            return most
        if not text.isdecimal():
            raise errors.BadRequest("limit param must be an integer")
        return min(int(text[:10]), most)

    def page(self, name: str, path: str, items: Sequence[object], marker: str | None) -> JsonObject:
        """Return the body of a list, with a link to the next page if this page is full.

        Args:
            name: Key of the items in the body.
            path: Path of the list below the versioned root.
            items: The rendered items of this page.
            marker: Id of the last item, or None if there are no items.
        """
        body: JsonObject = {name: items}
        if items and len(items) == self.limit and marker is not None:
            body[f"{name}_links"] = self.links.next(path, self.query, marker)
        return body
