# SPDX-License-Identifier: Apache-2.0
"""Identity: Kilonova's own token at Keystone, which it gives to nobody but neighbours, and the
catalogue.

A token lives for hours and is renewed before it ends; it is never written anywhere. It is fetched
by a thread of its own, one at a time, so that a silent identity service holds whoever needs one for
a moment only; after three failures in a row nothing is even tried for two seconds. A catalogue
comes with each token: what it does not name is looked for in a new one once a minute, and what it
names is read again every five minutes, while callers go on with the old one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from oslo_config import cfg

from common.clients.http import Breaker, not_registered, refuse_plain_text, require_answer
from common.domain import errors
from common.domain.errors import ConfigError
from common.security import tls

if TYPE_CHECKING:
    from keystoneauth1.access import AccessInfo

log = logging.getLogger(__name__)
T = TypeVar("T")
KEEP = 60.0  # seconds that a catalogue's silence about a service is believed
BELIEVED_SECONDS = 300.0  # seconds that what it names is believed
READ = 30.0  # seconds that the identity service has to answer
LOOK = 5.0  # seconds that it has when a process starts
# seconds that services wait for a token; commands, who have nothing else to do, wait READ
WAIT = 2.0
# seconds before its end from which a token is renewed, and until which it is given out
RENEW, GOOD = (
    120,
    15,
)
#: Services of the catalogue, and where each may be configured instead.
SECTIONS = {
    "image": "image",
    "network": "network",
    "shared-file-system": "share",
    "sharev2": "share",
    "block-storage": "volume",
    "volumev3": "volume",
    "volume": "volume",
}
NO_TOKEN = "The identity service gives Kilonova no token; check [identity] and that it runs."  # noqa: S105 - a message


class IdentityClient:
    """Kilonova's user; made after the process has forked. Thread-safe.

    Raises ConfigError where plain text would travel to a neighbour on another machine.

    Args:
        wait: seconds that callers wait for an answer, from when it was asked for.
        fetch: gets a new token with its catalogue, as keystoneauth's AccessInfo.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        wait: float = WAIT,
        fetch: Callable[[], AccessInfo] | None = None,
    ) -> None:
        tls.of_neighbours(conf)
        self._conf, self._wait, self._fetch = conf, wait, fetch or self._log_in
        self._lock, self._breaker = threading.Lock(), Breaker()
        self._known: AccessInfo | None = None
        self._complained: set[str] = set()
        self._known_since = 0.0
        # since when a new one is being fetched
        self._coming: tuple[float, Future[AccessInfo]] | None = None

    def look_in(self) -> None:
        """Get a token.

        Raises:
            ConfigError: the identity service knows no such user, password or project, or is not
            there.
            Unavailable: it does not answer.
        """
        from keystoneauth1 import exceptions

        own = self._conf.identity
        try:
            self._come(self._log_in(LOOK))
        except (exceptions.Unauthorized, exceptions.NotFound) as problem:
            what = "username, password, project_name" if problem.http_status == 401 else "auth_url"
            raise ConfigError(
                f"[identity] {what}: {own.auth_url} answers {problem.http_status} to user {own.username} of "
                f"project {own.project_name}, domain {own.domain}. Set what the identity service knows"
            ) from problem
        except exceptions.ClientException as problem:
            raise errors.Unavailable(f"{NO_TOKEN} {problem}") from problem

    def image_url(self) -> str:
        """The image service's URL ([image] endpoint, else from the catalogue).

        Raises:
            Unavailable: the catalogue names none, or cannot be read now.
        """
        found = self._endpoint(self._conf.image.endpoint, "image")
        if found is None:
            raise not_registered("image service", "image")
        return found

    def roles(self) -> list[str]:
        """Of our user, as its token says; empty where that is not known now."""
        with self._lock:
            return sorted((self._known.role_names or ()) if self._known is not None else ())

    def described(self) -> str:
        """Our user with its project and roles, for those who have to give it more."""
        own = self._conf.identity
        return f"{own.username} of project {own.project_name} ({', '.join(self.roles()) or 'its roles are not known'})"

    def token(self) -> str:
        """A token of Kilonova's own, renewed before it ends.

        Raises:
            Unavailable: the identity service gives none now.
        """
        return str(self._access().auth_token)

    def require_answer(self) -> None:
        """Raises Unavailable unless the identity service answers, and lets our own user in."""
        require_answer(self._conf.identity.auth_url)
        self.token()

    def with_token(self, call: Callable[[str], T], who: str) -> T:
        """What the call answers to our token. One that ``who`` does not accept any more is given
        up.

        Raises:
            Unavailable: so it was, or there is no token; the next call is made with a new one.
        """
        token = self.token()
        try:
            return call(token)
        except errors.Unauthorized as problem:
            self.forget_token(token)
            raise errors.Unavailable(f"{who} does not accept Kilonova's token.") from problem

    def forget_token(self, token: str) -> None:
        """This token is not accepted any more: the next question gets another."""
        with self._lock:
            if self._known is not None and self._known.auth_token == token:
                self._known = None

    def network_url(self) -> str | None:
        """The network service's URL ([network] endpoint, else from the catalogue); None: there is
        none.

        Raises:
            Unavailable: the catalogue cannot be read now.
        """
        return self._endpoint(self._conf.network.endpoint, "network")

    def share_url(self) -> str | None:
        """The shared file system service's URL ([share] endpoint, else from the catalogue); None:
        there is none.

        Raises:
            Unavailable: the catalogue cannot be read now.
        """
        configured = self._conf.share.endpoint
        return self._endpoint(configured, "shared-file-system") or self._endpoint(
            configured, "sharev2"
        )

    def volume_url(self) -> str | None:
        """The block storage service's URL ([volume] endpoint, else from the catalogue); None: there
        is none.

        Raises:
            Unavailable: the catalogue cannot be read now.
        """
        configured = self._conf.volume.endpoint
        return (
            self._endpoint(configured, "block-storage")
            or self._endpoint(configured, "volumev3")
            or self._endpoint(configured, "volume")
        )

    def compute_url(self) -> str:
        """The URL of the compute service in the catalogue, which is ours.

        Raises:
            Unavailable: the catalogue names none, or cannot be read now.
        """
        found = self._endpoint(None, "compute")
        if found is None:
            raise errors.Unavailable("The catalogue names no compute service; register it.")
        return found

    def _endpoint(self, configured: str | None, kind: str) -> str | None:
        """Of a neighbour; None: the catalogue does not name it, nor did it a minute ago."""
        if configured:
            return configured
        found = self._named(self._access(), kind)
        if found is None and time.monotonic() >= self._known_since + KEEP:
            found = self._named(self._access(fresh=True), kind)
        return found

    def _named(self, access: AccessInfo, kind: str) -> str | None:
        """What the catalogue says."""
        from keystoneauth1 import exceptions

        try:
            found = access.service_catalog.url_for(
                service_type=kind, region_name=self._conf.identity.region
            )
        except exceptions.EndpointNotFound:
            return None
        return self._judged(kind, str(found)) if found else None

    def _judged(self, kind: str, url: str) -> str:
        """Raises Unavailable: nothing is sent there as plain text; what waits goes on when that has
        been mended."""
        other = f", give one as [{SECTIONS[kind]}] endpoint" if kind in SECTIONS else ""
        try:
            return tls.of_neighbour(
                self._conf,
                f"the catalogue's endpoint of {kind}",
                url,
                f"let the catalogue name an https:// URL{other}",
            )
        except ConfigError as problem:
            if url not in self._complained:
                self._complained.add(url)
                log.error("%s", problem)
            raise errors.Unavailable(
                f"The endpoint of {kind} in the catalogue is plain text, which is refused; tell "
                "your operator."
            ) from problem

    # --- one token for all ---
    def _access(self, fresh: bool = False) -> AccessInfo:
        """The token that is known; else the one that is being fetched, if it comes in a moment."""
        with self._lock:
            known = self._known if not fresh else None
            is_old = time.monotonic() >= self._known_since + BELIEVED_SECONDS
            if known is not None and not is_old and not known.will_expire_soon(RENEW):
                return known
            if self._coming is None and not self._breaker.is_open():
                self._coming = (time.monotonic(), Future())
                threading.Thread(
                    target=self._get, args=self._coming[1:], name="token", daemon=True
                ).start()
            coming = self._coming
        if known is not None and not known.will_expire_soon(GOOD):
            return known
        if coming is None:
            raise errors.Unavailable(NO_TOKEN)
        since, future = coming
        try:
            return future.result(timeout=max(0.0, since + self._wait - time.monotonic()))
        except Exception as problem:
            raise errors.Unavailable(NO_TOKEN) from problem

    def _get(self, future: Future[AccessInfo]) -> None:
        """Fetch a token, and hand it to all that wait for it."""
        try:
            found = self._fetch()
        except Exception as problem:  # noqa: BLE001  # it is handed to those who wait
            self._come(None)
            future.set_exception(problem)
        else:
            self._come(found)
            future.set_result(found)

    def _come(self, found: AccessInfo | None) -> None:
        self._breaker.record(answered=found is not None)
        with self._lock:
            self._coming = None
            if found is not None:
                self._known, self._known_since = found, time.monotonic()

    def _log_in(self, timeout: float = READ) -> AccessInfo:
        from keystoneauth1 import session
        from keystoneauth1.identity import v3

        own = self._conf.identity
        password = v3.Password(
            auth_url=own.auth_url,
            username=own.username,
            password=own.password,
            user_domain_name=own.domain,
            project_name=own.project_name,
            project_domain_name=own.domain,
        )
        return password.get_access(
            refuse_plain_text(
                session.Session(timeout=timeout),
                partial(
                    tls.refusal_of_neighbour,
                    self._conf,
                    "[identity] auth_url leads to another address",
                ),
            )
        )
