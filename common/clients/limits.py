# SPDX-License-Identifier: Apache-2.0
"""Keystone's unified limits, read through oslo.limit and cached for a short time.

Only the reading part of oslo.limit is used. Its enforcer reads the limit, counts and compares in
separate steps, so concurrent requests could exceed a limit together. In Kilonova the count is part
of the transaction that adds to the counted resources. The section [oslo_limit] has oslo.limit's own
options, as in other services. Without ``auth_type`` there, Kilonova logs in as [identity]
specifies. The token must be system-scoped, because with another token Keystone silently leaves
limits out.

One thread sends each request, however many callers wait, and callers wait only briefly. After three
failures in a row no request is sent for two seconds. An unknown limit is ``Unavailable``, never "no
limit".
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, cast

from oslo_config import cfg

from common.clients.http import Breaker
from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.json_types import JsonObject
from common.security import tls
from common.service.log import get_logger

LOG = get_logger(__name__)
#: Seconds that a caller waits for limits.
WAIT = 5.0
#: Seconds that the identity service has for each answer.
READ = 5
#: Number of concurrent requests, and of projects in the cache.
AT_ONCE, MOST = 4, 10000
#: Stands for the registered limits, in place of a project.
EVERYBODY = "*"
GROUP = "oslo_limit"
NO_LIMITS = "The identity service does not return the limits of this project; try again later."
NOT_INSTALLED = "[quota] driver = unified needs oslo.limit: pip install 'kilonova[unified-limits]'"
NOT_SYSTEM = "[oslo_limit] has no system_scope = all; set it, because Keystone would leave out limits of other projects"


class Reader(Protocol):
    """The methods of oslo.limit's enforcer that read limits. None requests all resources."""

    def get_registered_limits(
        self, resources_to_check: Collection[str] | None
    ) -> list[tuple[str, int]]: ...

    def get_project_limits(
        self, project_id: str, resource_names: Collection[str] | None
    ) -> list[tuple[str, int]]: ...


class UnifiedLimits:
    """The cached limits of projects at Keystone. Created after the process has forked. Thread-safe.

    Args:
        seconds: Time that an answer is cached, counted from its request.
        reader: Opens the connection to the identity service. Called at the first request.
        wait: Seconds that callers wait for an answer, counted from its request.
        monotonic: The clock.
    """

    def __init__(
        self,
        seconds: float,
        reader: Callable[[], Reader],
        wait: float = WAIT,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._open, self._wait, self._monotonic = seconds, reader, wait, monotonic
        self._lock, self._opening, self._breaker = (
            threading.Lock(),
            threading.Lock(),
            Breaker(monotonic),
        )
        # Project -> the time of the request, and the limits. Oldest first.
        self._cache: OrderedDict[str, tuple[float, dict[str, int]]] = OrderedDict()
        self._requests: dict[str, tuple[float, Future[dict[str, int]]]] = {}
        self._reader: Reader | None = None
        self._pool = ThreadPoolExecutor(AT_ONCE, "limits")

    def of(self, project_id: str) -> Mapping[str, int]:
        """Return the limits of a project by resource name, from the cache or from Keystone.

        A limit of the project replaces the registered limit, which applies to all projects. A
        resource without either is missing in the result.

        Args:
            project_id: The project's id. "*" returns only the registered limits.

        Raises:
            Unavailable: The limits are not cached, and cannot be read in time.
        """
        try:
            requests = [self._request(name) for name in dict.fromkeys((EVERYBODY, project_id))]
            return {name: limit for answer in requests for name, limit in answer().items()}
        except Exception as problem:
            raise errors.Unavailable(NO_LIMITS) from problem

    def close(self) -> None:
        """Cancel the queued requests and accept no new ones. Running requests end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _request(self, name: str) -> Callable[[], dict[str, int]]:
        """Return a function that returns the limits of a project.

        If the limits are not cached, this starts a request, unless the same request is running. The
        returned function then waits for the result, and raises TimeoutError or the request's error.

        Args:
            name: The project's id, or ``EVERYBODY`` for the registered limits.

        Raises:
            Unavailable: The limits are not cached, no request is running, and the breaker is open.
        """
        with self._lock:
            cached_at, limits = self._cache.get(name, (float("-inf"), {}))
            if self._monotonic() < cached_at + self._seconds:
                return lambda: limits
            if name not in self._requests:
                if self._breaker.is_open():
                    raise errors.Unavailable(NO_LIMITS)
                now = self._monotonic()
                self._requests[name] = now, self._pool.submit(self._fetch, name, now)
            requested_at, future = self._requests[name]
        return lambda: future.result(
            timeout=max(0.0, requested_at + self._wait - self._monotonic())
        )

    def _fetch(self, name: str, now: float) -> dict[str, int]:
        """Read the limits of a project, or the registered limits, cache them and return them.

        Errors are logged and passed on.

        Args:
            name: The project's id, or ``EVERYBODY``.
            now: The time of the request, from which the age of the cached limits counts.
        """
        limits: dict[str, int] | None = None
        try:
            reader = self._get_reader()
            limits = dict(
                reader.get_registered_limits(None)
                if name == EVERYBODY
                else reader.get_project_limits(name, None)
            )
            return limits
        except Exception as problem:
            LOG.warning(
                "limits cannot be read from the identity service",
                kind=type(problem).__name__,
                problem=problem,
            )
            raise
        finally:
            self._breaker.record(answered=limits is not None)
            with self._lock:
                del self._requests[name]
                if limits is not None:
                    self._cache[name] = now, limits
                    self._cache.move_to_end(name)
                    while len(self._cache) > MOST:
                        self._cache.popitem(last=False)

    def _get_reader(self) -> Reader:
        """Return the connection, which all callers share. Open the connection at the first call."""
        with self._opening:
            if self._reader is None:
                self._reader = self._open()
            return self._reader


def configured(conf: cfg.ConfigOpts) -> UnifiedLimits | None:
    """Return the reader of Keystone's limits, or None if [quota] driver is not "unified".

    Raises:
        ConfigError: oslo.limit is not installed, or a URL in [oslo_limit] is plain HTTP to another
            machine.
    """
    if conf.quota.driver != "unified":
        return None
    try:
        _set_defaults(conf)
    except ImportError as problem:
        raise ConfigError(NOT_INSTALLED) from problem
    return UnifiedLimits(conf.quota.unified_limits_cache_seconds, _through_oslo)


def _set_defaults(conf: cfg.ConfigOpts) -> None:
    """Register oslo.limit's options and set their defaults.

    If [oslo_limit] has no auth_type, user, password and URL of [identity] are the defaults. If
    [oslo_limit] names no endpoint, the default is the compute service in [identity] region.

    Raises:
        ConfigError: A URL in [oslo_limit] is plain HTTP to another machine.
        ImportError: oslo.limit is not installed.
    """
    from keystoneauth1 import loading
    from oslo_limit import limit  # noqa: F401  # The import registers its options.

    section, own = conf[GROUP], conf.identity
    defaults: JsonObject = {"timeout": READ}
    if not section.auth_type:
        conf.register_opts(loading.get_auth_plugin_conf_options("password"), group=GROUP)
        defaults |= {
            "auth_type": "password",
            "auth_url": own.auth_url,
            "username": own.username,
            "password": own.password,
            "user_domain_name": own.domain,
            "system_scope": "all",
        }
    if not (section.endpoint_id or section.endpoint_service_type or section.endpoint_service_name):
        defaults |= {"endpoint_service_type": "compute", "endpoint_region_name": own.region}
    for name, value in defaults.items():
        conf.set_default(name, value, group=GROUP)
    if section.auth_type:
        conf.register_opts(loading.get_auth_plugin_conf_options(section.auth_type), group=GROUP)
    for name in ("auth_url", "endpoint_override"):
        if url := getattr(section, name, None):
            tls.check_external_url(conf, f"[{GROUP}] {name}", url)


def _through_oslo() -> Reader:
    """Return oslo.limit's enforcer, logged in with a system-scoped token.

    Errors of the login are passed on.

    Raises:
        ConfigError: The token is not system-scoped.
    """
    from oslo_limit import limit

    enforcer = limit.Enforcer(lambda project_id, resources: {}, cache=False)
    session: Any = enforcer.connection.session
    if not session.auth.get_access(session).system_scoped:
        raise ConfigError(NOT_SYSTEM)
    return cast(Reader, enforcer)  # The enforcer accepts None for all resources too.
