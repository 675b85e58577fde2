# SPDX-License-Identifier: Apache-2.0
"""Requests of embedded services to the image and the compute service, as user kilonova."""

from collections.abc import Collection, Mapping
from typing import Any

import requests
from keystoneauth1 import exceptions
from keystoneauth1.identity import v3
from keystoneauth1.session import Session

from common.service.log import get_logger
from deploy.one_machine.services.database import DbValues

LOG = get_logger("standalone")
#: Statuses with which the compute service refuses events now but may accept them later.
RETRIED = (403, 423, 425)


class Later(Exception):
    """Another service cannot answer a request now. The caller must try again later."""


def session_of(identity: DbValues, timeout_seconds: float) -> Session:
    """Return a session that authenticates as the embedded service's own user.

    Args:
        identity: The options from `guard.identity_of`.
        timeout_seconds: The longest wait for a response, for each request.
    """
    names = ("auth_url", "username", "password", "project_name")
    plugin = v3.Password(
        user_domain_id="default",
        project_domain_id="default",
        **{name: identity[name] for name in names},
    )
    return Session(auth=plugin, timeout=timeout_seconds)


class ExternalService:
    """A service at a fixed URL, or else at the URL of its type in the catalogue."""

    kind = ""

    def __init__(self, session: Session, url: str | None) -> None:
        self._session, self._fixed = session, url

    def url(self) -> str:
        """Return the URL without a slash at the end, or "" if the catalogue has no URL.

        Raises:
            ClientException: There is no fixed URL, and the identity service does not answer or
                refuses the service's own user.
        """
        url = self._fixed or self._session.get_endpoint(service_type=self.kind)
        return str(url or "").rstrip("/")

    def _request(self, method: str, path: str, **options: Any) -> requests.Response:  # noqa: ANN401 - keystoneauth
        """Send a request and return the response.

        By default the request has a token of the service's own user.

        Args:
            method: The HTTP method.
            path: The path behind `url`.
            options: Options of keystoneauth's ``Session.request``. With ``authenticated=False`` the
                caller gives the token.

        Raises:
            Later: There is no URL, token or response, or the status is transient (401, 408, 429,
                5xx).
        """
        try:
            response = self._session.request(
                f"{self.url()}{path}", method, raise_exc=False, redirect=False, **options
            )
        except (exceptions.ClientException, OSError) as error:
            raise Later(
                f"the {self.kind} service does not answer: {type(error).__name__}"
            ) from error
        if response.status_code >= 500 or response.status_code in (401, 408, 429):
            raise Later(f"the {self.kind} service answers with status {response.status_code}")
        return response


class ComputeEvents(ExternalService):
    """The compute service, which receives events."""

    kind = "compute"

    def send_events(self, events: Collection[Mapping[str, str]]) -> bool:
        """Send events to the compute service.

        Args:
            events: The events, as in Nova's API os-server-external-events.

        Returns:
            False if the events must be sent again later. True if the compute service accepted them,
            or refuses them for good.
        """
        try:
            response = self._request(
                "POST",
                "/os-server-external-events",
                json={"events": list(events)},
                headers={"OpenStack-API-Version": "compute 2.93"},
            )
        except Later as error:
            LOG.warning(
                "events cannot be sent to the compute service and are sent again",
                count=len(events),
                problem=error,
            )
            return False
        if response.status_code in RETRIED:
            LOG.warning(
                "the compute service did not accept events, which are sent again",
                status=response.status_code,
                count=len(events),
            )
            return False
        if response.status_code not in (200, 207, 404, 422):
            LOG.error(
                "the compute service refuses events for good",
                count=len(events),
                status=response.status_code,
                answer=response.text[:200],
            )
        return True
