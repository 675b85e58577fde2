# SPDX-License-Identifier: Apache-2.0
"""Identity: Kilonova's own session at Keystone, and the short token it gives to a host for images.

The token is minted per message, kept for a minute, and never written anywhere. The catalogue comes with a token of our
own, which lives for hours: what it does not name is looked for in a new one once a minute.
"""
from __future__ import annotations

import threading
import time
from typing import Any

from oslo_config import cfg

from common import errors
from common.models import Access

KEEP = 60.0
READ = 30.0
NO_TOKEN = "The identity service gives Kilonova no token; check [identity] and that it runs."


class Identity:
    """Kilonova's user; made after the process has forked. Thread-safe."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf
        self._lock = threading.Lock()
        self._access: tuple[float, Access] | None = None
        self._session: Any = None
        self._renewed: dict[str, float] = {}        # when a new catalogue was asked for each kind of service

    def session(self) -> Any:
        """A keystoneauth session as Kilonova's own user."""
        if self._session is None:
            from keystoneauth1 import session
            from keystoneauth1.identity import v3
            own = self._conf.identity
            password = v3.Password(auth_url=own.auth_url, username=own.username, password=own.password,
                                   user_domain_name=own.domain, project_name=own.project_name,
                                   project_domain_name=own.domain)
            self._session = session.Session(auth=password, timeout=READ)
        return self._session

    def image_access(self) -> Access:
        """The image service's URL ([image] endpoint, else from the catalogue) and a token for a host.

        Raises:
            Unavailable: the identity service gives none now.
        """
        from keystoneauth1 import exceptions
        with self._lock:
            if self._access is None or self._access[0] < time.monotonic():
                try:
                    access = Access(self._image_url(), str(self.session().get_token()))
                except (exceptions.ClientException, OSError) as problem:
                    raise errors.Unavailable(NO_TOKEN) from problem
                self._access = (time.monotonic() + KEEP, access)
            return self._access[1]

    def token(self) -> str:
        """A token of Kilonova's own, renewed before it ends.

        Raises:
            Unavailable: the identity service gives none now.
        """
        from keystoneauth1 import exceptions
        try:
            return str(self.session().get_token())
        except (exceptions.ClientException, OSError) as problem:
            raise errors.Unavailable(NO_TOKEN) from problem

    def forget_token(self) -> None:
        """The token is not accepted any more: the next question gets another."""
        self.session().invalidate()

    def network_url(self) -> str | None:
        """The network service's URL ([network] endpoint, else from the catalogue); None: there is none.

        Raises:
            Unavailable: the catalogue cannot be read now.
        """
        from keystoneauth1 import exceptions
        try:
            return self._endpoint(self._conf.network.endpoint, "network")
        except (exceptions.ClientException, OSError) as problem:
            raise errors.Unavailable(NO_TOKEN) from problem

    def _image_url(self) -> str:
        found = self._endpoint(self._conf.image.endpoint, "image")
        if found is None:
            raise errors.Unavailable("The catalogue names no image service; register it or set [image] endpoint.")
        return found

    def _endpoint(self, configured: str | None, kind: str) -> str | None:
        """Of a neighbour; None: the catalogue does not name it, nor did it a minute ago."""
        if configured:
            return configured
        found = self._named(kind)
        if found is None and time.monotonic() >= self._renewed.get(kind, -KEEP) + KEEP:
            self._renewed[kind] = time.monotonic()
            self.forget_token()
            found = self._named(kind)
        return found

    def _named(self, kind: str) -> str | None:
        """What the catalogue of the present token says."""
        from keystoneauth1 import exceptions
        try:
            found = self.session().get_endpoint(service_type=kind, region_name=self._conf.identity.region)
        except exceptions.EndpointNotFound:
            return None
        return str(found) if found else None
