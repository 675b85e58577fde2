# SPDX-License-Identifier: Apache-2.0
"""Who asks: the identity service's word on the caller's token, told to the application in the WSGI environment.

keystonemiddleware around the application, in the mode that leaves the refusal to it, so that version documents need no
token. An identity service that does not answer is a 503 here, not a wrong token. What a token stands for is remembered
for ``REMEMBERED`` seconds in one cache for all threads, which is also how long a revoked token may still be good.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import orjson
from keystoneauth1 import exceptions as identity_exceptions
from keystonemiddleware import auth_token
from keystonemiddleware.auth_token import _exceptions as middleware_exceptions
from oslo_config import cfg

from common import errors
from compute_api import faults

REMEMBERED = 60
MOST = 10_000
_CACHE = "kilonova.tokens"
_SILENT = (identity_exceptions.ConnectFailure, identity_exceptions.DiscoveryFailure,
           identity_exceptions.RequestTimeout, middleware_exceptions.ServiceError)


class Cache:
    """What keystonemiddleware asks of a cache, bounded, for all threads. Keys are hashes of tokens."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, bytes]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> bytes | None:
        """The value, until its time is over."""
        until, value = self._known.get(key, (0.0, b""))
        return value if self._monotonic() < until else None

    def set(self, key: str, value: bytes, time: float = 0) -> None:
        """Keep a value for some seconds."""
        with self._lock:
            if len(self._known) >= MOST:
                now = self._monotonic()
                self._known = {known: item for known, item in self._known.items() if now < item[0]}
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = (self._monotonic() + time, value)


class _Protocol(auth_token.AuthProtocol):  # type: ignore[misc]  # the library has no types
    """The library's middleware, which tells silence from refusal."""

    def fetch_token(self, token: str, **more: Any) -> Any:
        """Raises Unavailable when the identity service does not answer."""
        try:
            return super().fetch_token(token, **more)
        except middleware_exceptions.InvalidToken as problem:
            if not isinstance(problem.__context__, _SILENT):
                raise
            raise errors.Unavailable("The identity service does not answer; try again later.") from problem


def authenticated(application: Any, conf: cfg.ConfigOpts,
                  fault: Callable[[int, str], dict[str, Any]] = faults.body) -> Any:
    """The application behind tokens that [identity] can check; ``fault`` makes the body of an error."""
    # It warns of every option of the password plugin, which it then uses.
    logging.getLogger("keystonemiddleware._common.config").setLevel(logging.ERROR)
    own = conf.identity
    protocol = _Protocol(application, {
        "auth_type": "password", "auth_url": own.auth_url, "username": own.username, "password": own.password,
        "user_domain_name": own.domain, "project_name": own.project_name, "project_domain_name": own.domain,
        "www_authenticate_uri": own.auth_url, "delay_auth_decision": True, "include_service_catalog": False,
        "service_token_roles_required": True, "token_cache_time": REMEMBERED, "cache": _CACHE,
        "region_name": own.region, "http_connect_timeout": 10})
    cache = Cache()

    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        environ[_CACHE] = cache
        try:
            return protocol(environ, start_response)
        except errors.Unavailable as problem:
            start_response("503 Service Unavailable", [("Content-Type", "application/json"), ("Retry-After", "1")])
            return [orjson.dumps(fault(503, problem.text))]
    return entry
