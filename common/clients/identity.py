# SPDX-License-Identifier: Apache-2.0
"""Kilonova's own token at Keystone, and the catalogue. The token is sent to external services only.

A token lives for hours, is renewed before its expiry, and is never stored on disk. A thread fetches
the token, one request at a time, so a silent identity service delays callers only briefly. After
three failures in a row no request is sent for two seconds. Each token comes with a catalogue. A
service that the catalogue lacks is looked up in a new catalogue once a minute. The whole catalogue
is read again every five minutes, while callers continue with the old one.
"""

from __future__ import annotations

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
from common.service.log import get_logger

if TYPE_CHECKING:
    from keystoneauth1.access import AccessInfo

log = get_logger(__name__)
T = TypeVar("T")
#: Seconds until a service that the catalogue lacks is looked up again.
KEEP = 60.0
#: Seconds until the catalogue is read again.
BELIEVED_SECONDS = 300.0
#: Seconds that the identity service has to answer.
READ = 30.0
#: The same when a process starts.
LOOK = 5.0
#: Seconds that callers in services wait for a token. CLI commands wait READ.
WAIT = 2.0
#: Seconds before its expiry at which a token is renewed, and at which its use ends.
RENEW, GOOD = (
    120,
    15,
)
#: Service type in the catalogue -> the configuration section that can replace the entry.
SECTIONS = {
    "image": "image",
    "network": "network",
    "shared-file-system": "share",
    "sharev2": "share",
    "block-storage": "volume",
    "volumev3": "volume",
    "volume": "volume",
}
NO_TOKEN = (
    "Kilonova gets no token from the identity service; check [identity], and that the service runs."  # noqa: S105 - a message
)


class IdentityClient:
    """Kilonova's user at Keystone. Created after the process has forked. Thread-safe.

    Args:
        conf: The configuration. [identity] names the user, the project and the service's URL.
        wait: Seconds that callers wait for a token, counted from its request.
        fetch: Returns a new token with its catalogue, as keystoneauth's AccessInfo. None: log in as
            [identity] specifies.

    Raises:
        ConfigError: Plain HTTP would be used to another machine.
    """

    def __init__(
        self,
        conf: cfg.ConfigOpts,
        wait: float = WAIT,
        fetch: Callable[[], AccessInfo] | None = None,
    ) -> None:
        tls.check_external_urls(conf)
        self._conf, self._wait, self._fetch = conf, wait, fetch or self._log_in
        self._lock, self._breaker = threading.Lock(), Breaker()
        self._access_info: AccessInfo | None = None
        self._logged_urls: set[str] = set()
        self._fetched_at = 0.0
        # The time of the running request for a new token, and its future.
        self._fetching: tuple[float, Future[AccessInfo]] | None = None

    def look_in(self) -> None:
        """Check that Kilonova's user can log in, and store the new token.

        Raises:
            ConfigError: The identity service does not accept the user, password or project (401),
                or the URL is wrong (404).
            Unavailable: The identity service does not answer, or answers with another error.
        """
        from keystoneauth1 import exceptions

        own = self._conf.identity
        try:
            self._store(self._log_in(LOOK))
        except (exceptions.Unauthorized, exceptions.NotFound) as problem:
            options = (
                "username, password, project_name" if problem.http_status == 401 else "auth_url"
            )
            raise ConfigError(
                f"[identity] {options}: {own.auth_url} answers {problem.http_status} to user {own.username} of "
                f"project {own.project_name}, domain {own.domain}. Correct these options"
            ) from problem
        except exceptions.ClientException as problem:
            raise errors.Unavailable(f"{NO_TOKEN} {problem}") from problem

    def image_url(self) -> str:
        """Return the image service's URL, from [image] endpoint or from the catalogue.

        Raises:
            Unavailable: The catalogue does not contain the service or cannot be read now, or the
                service's URL there is plain HTTP to another machine.
        """
        url = self._endpoint(self._conf.image.endpoint, "image")
        if url is None:
            raise not_registered("image service", "image")
        return url

    def roles(self) -> list[str]:
        """Return the sorted roles of Kilonova's user in the present token.

        The list is empty if there is no token now. This function fetches no token.
        """
        with self._lock:
            return sorted(
                (self._access_info.role_names or ()) if self._access_info is not None else ()
            )

    def describe_user(self) -> str:
        """Return Kilonova's user, project and roles as text, for errors about missing roles.

        Without roles in the present token, the text contains "its roles are not known".
        """
        own = self._conf.identity
        return f"{own.username} of project {own.project_name} ({', '.join(self.roles()) or 'its roles are not known'})"

    def token(self) -> str:
        """Return Kilonova's own token, valid for at least ``GOOD`` seconds.

        Raises:
            Unavailable: There is no such token, and none can be fetched in time.
        """
        return str(self._access().auth_token)

    def require_answer(self) -> None:
        """Check that the identity service answers, and that Kilonova has a token or gets one.

        A token that is still valid is not checked again at the service.

        Raises:
            Unavailable: The service does not answer, or no token can be fetched in time.
        """
        require_answer(self._conf.identity.auth_url)
        self.token()

    def with_token(self, call: Callable[[str], T], who: str) -> T:
        """Call a function with Kilonova's token, and return its result.

        If the service refuses the token, the token is dropped, and the next call fetches a new one.
        The function is not called again. Other exceptions of the function are passed on.

        Args:
            call: The function. Raises Unauthorized if the service refuses the token.
            who: The name of the service that the function calls, for the error, for example "The
                image service".

        Raises:
            Unavailable: The service refused the token, or there is no token.
        """
        token = self.token()
        try:
            return call(token)
        except errors.Unauthorized as problem:
            self.forget_token(token)
            raise errors.Unavailable(f"{who} does not accept Kilonova's token.") from problem

    def forget_token(self, token: str) -> None:
        """Drop a token that a service refused, so that the next call fetches a new token.

        Do nothing if another token is in use by now.
        """
        with self._lock:
            if self._access_info is not None and self._access_info.auth_token == token:
                self._access_info = None

    def network_url(self) -> str | None:
        """Return the network service's URL, from [network] endpoint or from the catalogue.

        Returns:
            None if the cloud has no network service.

        Raises:
            Unavailable: The catalogue cannot be read now, or the service's URL there is plain HTTP
                to another machine.
        """
        return self._endpoint(self._conf.network.endpoint, "network")

    def share_url(self) -> str | None:
        """Return the shared file system service's URL, from [share] endpoint or from the catalogue.

        Returns:
            None if the cloud has no such service.

        Raises:
            Unavailable: The catalogue cannot be read now, or the service's URL there is plain HTTP
                to another machine.
        """
        configured = self._conf.share.endpoint
        return self._endpoint(configured, "shared-file-system") or self._endpoint(
            configured, "sharev2"
        )

    def volume_url(self) -> str | None:
        """Return the block storage service's URL, from [volume] endpoint or from the catalogue.

        Returns:
            None if the cloud has no such service.

        Raises:
            Unavailable: The catalogue cannot be read now, or the service's URL there is plain HTTP
                to another machine.
        """
        configured = self._conf.volume.endpoint
        return (
            self._endpoint(configured, "block-storage")
            or self._endpoint(configured, "volumev3")
            or self._endpoint(configured, "volume")
        )

    def compute_url(self) -> str:
        """Return the URL of Kilonova's own API in the catalogue.

        Raises:
            Unavailable: The catalogue does not contain the compute service or cannot be read now,
                or the URL there is plain HTTP to another machine.
        """
        url = self._endpoint(None, "compute")
        if url is None:
            raise errors.Unavailable("The catalogue names no compute service; register it.")
        return url

    def _endpoint(self, configured: str | None, kind: str) -> str | None:
        """Return the configured URL of a service, or the URL in the catalogue.

        Args:
            configured: The configured URL, or None.
            kind: The service type in the catalogue.

        Returns:
            None if a catalogue that is at most ``KEEP`` seconds old lacks the service. An older
            catalogue without the service is first read again.

        Raises:
            Unavailable: The catalogue cannot be read, or the service's URL there is plain HTTP to
                another machine.
        """
        if configured:
            return configured
        url = self._look_up(self._access(), kind)
        if url is None and time.monotonic() >= self._fetched_at + KEEP:
            url = self._look_up(self._access(fresh=True), kind)
        return url

    def _look_up(self, access: AccessInfo, kind: str) -> str | None:
        """Return a service's public URL in a catalogue. None without a URL in [identity] region.

        Raises:
            Unavailable: The URL is plain HTTP to another machine.
        """
        from keystoneauth1 import exceptions

        try:
            url = access.service_catalog.url_for(
                service_type=kind, region_name=self._conf.identity.region
            )
        except exceptions.EndpointNotFound:
            return None
        return self._require_tls(kind, str(url)) if url else None

    def _require_tls(self, kind: str, url: str) -> str:
        """Return the URL unchanged, after a check that it is not plain HTTP to another machine.

        A refused URL is logged once. With [identity] or [tls] allow_plain_text every URL passes.

        Raises:
            Unavailable: The URL is refused. Actions wait until the operator has corrected the
                catalogue.
        """
        alternative = f", set one as [{SECTIONS[kind]}] endpoint" if kind in SECTIONS else ""
        try:
            return tls.check_external_url(
                self._conf,
                f"the catalogue's endpoint of {kind}",
                url,
                f"register an https:// URL in the catalogue{alternative}",
            )
        except ConfigError as problem:
            if url not in self._logged_urls:
                self._logged_urls.add(url)
                log.error(
                    "an endpoint of the catalogue is refused, because it is plain HTTP",
                    service=kind,
                    problem=problem,
                )
            raise errors.Unavailable(
                f"Kilonova refuses the endpoint of {kind} in the catalogue, because it is plain HTTP; "
                "inform your operator."
            ) from problem

    # --- one token for all callers ---
    def _access(self, fresh: bool = False) -> AccessInfo:
        """Return the present token with its catalogue, or wait for the token that is being fetched.

        If the present token ends within ``RENEW`` seconds, or its catalogue is older than
        ``BELIEVED_SECONDS``, a thread fetches the next token, unless the breaker is open. The
        present token is returned meanwhile, unless it ends within ``GOOD`` seconds.

        Args:
            fresh: Ignore the present token and wait for a new one.

        Raises:
            Unavailable: No token was fetched in time, the request failed, or the breaker is open.
        """
        with self._lock:
            present = self._access_info if not fresh else None
            is_old = time.monotonic() >= self._fetched_at + BELIEVED_SECONDS
            if present is not None and not is_old and not present.will_expire_soon(RENEW):
                return present
            if self._fetching is None and not self._breaker.is_open():
                self._fetching = (time.monotonic(), Future())
                threading.Thread(
                    target=self._get, args=self._fetching[1:], name="token", daemon=True
                ).start()
            request = self._fetching
        if present is not None and not present.will_expire_soon(GOOD):
            return present
        if request is None:
            raise errors.Unavailable(NO_TOKEN)
        since, future = request
        try:
            return future.result(timeout=max(0.0, since + self._wait - time.monotonic()))
        except Exception as problem:
            raise errors.Unavailable(NO_TOKEN) from problem

    def _get(self, future: Future[AccessInfo]) -> None:
        """Fetch a token, store it, and pass the token or the error to all waiting callers."""
        try:
            access = self._fetch()
        except Exception as problem:  # noqa: BLE001  # The waiting callers receive the error.
            self._store(None)
            future.set_exception(problem)
        else:
            self._store(access)
            future.set_result(access)

    def _store(self, access: AccessInfo | None) -> None:
        self._breaker.record(answered=access is not None)
        with self._lock:
            self._fetching = None
            if access is not None:
                self._access_info, self._fetched_at = access, time.monotonic()

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
                    tls.refusal_of_external_url,
                    self._conf,
                    "an address to which [identity] auth_url redirects",
                ),
            )
        )
