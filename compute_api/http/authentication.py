# SPDX-License-Identifier: Apache-2.0
"""Authentication: keystonemiddleware validates the token and stores the caller in the environment.

The application refuses unauthenticated requests, so that version documents need no token. If the
identity service does not answer, the response is 503. Tokens are cached for ``CACHE_SECONDS`` for
all threads. A revoked token stays valid for that time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson
from keystoneauth1 import exceptions as identity_exceptions
from keystonemiddleware import auth_token
from keystonemiddleware.auth_token import _exceptions as middleware_exceptions
from oslo_config import cfg

from common.clients import http
from common.domain import errors
from common.security import tls

CACHE_SECONDS = 60
MAX_CACHED_TOKENS = 10_000
_CACHE = "kilonova.tokens"
#: Timeout of each request to the identity service. A request to the API waits for at most two: the
#: discovery and the validation of the token.
ANSWER_SECONDS = 4
_NO_ANSWER = (
    # This includes a service that accepts a connection and does not answer.
    identity_exceptions.ConnectionError,
    identity_exceptions.DiscoveryFailure,
    identity_exceptions.RequestTimeout,
    middleware_exceptions.ServiceError,
)


class TokenCache:
    """A bounded token cache for keystonemiddleware. Keys are hashes of tokens. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._values: dict[str, tuple[float, bytes]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        """Return True even if empty, because the library replaces a false cache with its own."""
        return True

    def get(self, key: str) -> bytes | None:
        """Return the value of a key, or None if the key is unknown or its value has expired."""
        until, value = self._values.get(key, (0.0, b""))
        return value if self._monotonic() < until else None

    def set(self, key: str, value: bytes, time: float = 0) -> None:
        """Store a value for ``time`` seconds.

        A full cache first drops the expired values, or all values if none has expired.
        """
        with self._lock:
            if len(self._values) >= MAX_CACHED_TOKENS:
                now = self._monotonic()
                self._values = {
                    other: item for other, item in self._values.items() if now < item[0]
                }
            if len(self._values) >= MAX_CACHED_TOKENS:
                self._values.clear()
            self._values[key] = (self._monotonic() + time, value)


class _AuthProtocol(auth_token.AuthProtocol):  # type: ignore[misc]  # the library has no types
    """The library's middleware with two changes.

    The middleware refuses an identity endpoint for which ``refusal`` returns a reason. If the
    identity service does not answer, the middleware raises Unavailable, where the library may treat
    the token as invalid.
    """

    refusal: Callable[[str], str]

    def _create_session(self, **arguments: object) -> Any:  # noqa: ANN401 - keystonemiddleware has no types
        return http.refuse_plain_text(super()._create_session(**arguments), self.refusal)

    def fetch_token(self, token: str, **arguments: object) -> Any:  # noqa: ANN401 - keystonemiddleware has no types
        """Return the data of a token.

        Raises:
            InvalidToken: The token is not valid.
            Unavailable: The identity service does not answer.
        """
        try:
            return super().fetch_token(token, **arguments)
        except (middleware_exceptions.InvalidToken, *_NO_ANSWER) as problem:
            if not isinstance(problem, _NO_ANSWER) and not isinstance(
                problem.__context__, _NO_ANSWER
            ):
                raise
            raise errors.Unavailable(
                "The identity service does not answer; try again later."
            ) from problem


def authenticate(
    application: WSGIApplication,
    conf: cfg.ConfigOpts,
    fault: Callable[[int, str], object],
    cache: TokenCache | None = None,
) -> WSGIApplication:
    """Wrap the application so that tokens are validated before the application is called.

    A request without a valid token reaches the application too, without a caller in the
    environment. The application refuses such a request. If the identity service does not answer,
    the response is 503.

    Args:
        application: The application.
        conf: The configuration.
        fault: Builds the body of an error from status and text.
        cache: The cache of tokens. None creates a new cache.

    Raises:
        ConfigError: [identity] auth_url is plain HTTP to another machine, and allow_plain_text is
            not set.
    """
    # The library warns about every option of the password plugin although it uses them.
    logging.getLogger("keystonemiddleware._common.config").setLevel(logging.ERROR)
    identity = conf.identity
    tls.check_external_url(conf, "[identity] auth_url", identity.auth_url)
    check_endpoint = partial(
        tls.refusal_of_external_url, conf, "the identity service's endpoint in the catalogue"
    )
    # The library registers a required option. In the process's own configuration, that option would
    # make every reload fail.
    options = cfg.ConfigOpts()
    options([], project="kilonova", default_config_files=[], default_config_dirs=[])
    protocol = type("AuthProtocol", (_AuthProtocol,), {"refusal": staticmethod(check_endpoint)})(
        application,
        {
            "oslo_config_config": options,
            "auth_type": "password",
            "auth_url": identity.auth_url,
            "username": identity.username,
            "password": identity.password,
            "user_domain_name": identity.domain,
            "project_name": identity.project_name,
            "project_domain_name": identity.domain,
            "www_authenticate_uri": identity.auth_url,
            "delay_auth_decision": True,
            "include_service_catalog": False,
            "service_token_roles_required": True,
            "token_cache_time": CACHE_SECONDS,
            "cache": _CACHE,
            "region_name": identity.region,
            "http_connect_timeout": ANSWER_SECONDS,
            "http_request_max_retries": 0,
        },
    )
    cache = TokenCache() if cache is None else cache

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ[_CACHE] = cache
        try:
            response: Iterable[bytes] = protocol(environ, start_response)
            return response
        except errors.Unavailable as problem:
            start_response(
                "503 Service Unavailable",
                [("Content-Type", "application/json"), ("Retry-After", "1")],
            )
            return [orjson.dumps(fault(503, problem.text))]

    return entry
