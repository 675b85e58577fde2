# SPDX-License-Identifier: Apache-2.0
"""Authentication: keystonemiddleware around an application, which says in the WSGI environment who
the caller is.

It leaves the refusal to the application, so that version documents need no token. An identity
service that does not answer is a 503, not a wrong token. Tokens are cached for ``CACHE_SECONDS``
seconds for all threads; a revoked token is good for as long."""

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
#: Seconds for each of the two requests that a request of ours may wait for: where the identity
#: service is, and whose token this is.
ANSWER_SECONDS = 4
_SILENT = (
    identity_exceptions.ConnectionError,  # also of a service that accepts and does not answer
    identity_exceptions.DiscoveryFailure,
    identity_exceptions.RequestTimeout,
    middleware_exceptions.ServiceError,
)


class TokenCache:
    """What keystonemiddleware asks of a cache, bounded, for all threads. Keys are hashes of
    tokens."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, bytes]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __bool__(self) -> bool:
        """Also while it is empty: the library takes a cache that is false for none, and its own for
        ever."""
        return True

    def get(self, key: str) -> bytes | None:
        """The value, until its time is over."""
        until, value = self._known.get(key, (0.0, b""))
        return value if self._monotonic() < until else None

    def set(self, key: str, value: bytes, time: float = 0) -> None:
        """Keep a value for some seconds."""
        with self._lock:
            if len(self._known) >= MAX_CACHED_TOKENS:
                now = self._monotonic()
                self._known = {known: item for known, item in self._known.items() if now < item[0]}
            if len(self._known) >= MAX_CACHED_TOKENS:
                self._known.clear()
            self._known[key] = (self._monotonic() + time, value)


class _AuthProtocol(auth_token.AuthProtocol):  # type: ignore[misc]  # the library has no types
    """The library's middleware, asking the identity service where the catalogue says that it is. A
    service that does not answer is no wrong token."""

    refusal: Callable[[str], str]

    def _create_session(self, **more: object) -> Any:  # noqa: ANN401 - keystonemiddleware has no types
        return http.refuse_plain_text(super()._create_session(**more), self.refusal)

    def fetch_token(self, token: str, **more: object) -> Any:  # noqa: ANN401 - keystonemiddleware has no types
        """Raises Unavailable when the identity service does not answer."""
        try:
            return super().fetch_token(token, **more)
        except (middleware_exceptions.InvalidToken, *_SILENT) as problem:
            if not isinstance(problem, _SILENT) and not isinstance(problem.__context__, _SILENT):
                raise
            raise errors.Unavailable(
                "The identity service does not answer; try again later."
            ) from problem


def authenticated(
    application: WSGIApplication,
    conf: cfg.ConfigOpts,
    fault: Callable[[int, str], object],
    cache: TokenCache | None = None,
) -> WSGIApplication:
    """The application behind tokens that [identity] can check; ``fault`` makes the body of an
    error."""
    # It warns of every option of the password plugin, which it then uses.
    logging.getLogger("keystonemiddleware._common.config").setLevel(logging.ERROR)
    own = conf.identity
    tls.of_neighbour(conf, "[identity] auth_url", own.auth_url)
    judge = partial(
        tls.refusal_of_neighbour, conf, "the identity service's endpoint in the catalogue"
    )
    # Options of its own: the library registers one that is required, for which a reload of ours
    # would then refuse every file.
    options = cfg.ConfigOpts()
    options([], project="kilonova", default_config_files=[], default_config_dirs=[])
    protocol = type("AuthProtocol", (_AuthProtocol,), {"refusal": staticmethod(judge)})(
        application,
        {
            "oslo_config_config": options,
            "auth_type": "password",
            "auth_url": own.auth_url,
            "username": own.username,
            "password": own.password,
            "user_domain_name": own.domain,
            "project_name": own.project_name,
            "project_domain_name": own.domain,
            "www_authenticate_uri": own.auth_url,
            "delay_auth_decision": True,
            "include_service_catalog": False,
            "service_token_roles_required": True,
            "token_cache_time": CACHE_SECONDS,
            "cache": _CACHE,
            "region_name": own.region,
            "http_connect_timeout": ANSWER_SECONDS,
            "http_request_max_retries": 0,
        },
    )
    cache = TokenCache() if cache is None else cache

    def entry(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environ[_CACHE] = cache
        try:
            answer: Iterable[bytes] = protocol(environ, start_response)
            return answer
        except errors.Unavailable as problem:
            start_response(
                "503 Service Unavailable",
                [("Content-Type", "application/json"), ("Retry-After", "1")],
            )
            return [orjson.dumps(fault(503, problem.text))]

    return entry
