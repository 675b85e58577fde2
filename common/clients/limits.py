# SPDX-License-Identifier: Apache-2.0
"""Keystone's unified limits: the numbers, read through oslo.limit, and remembered for a short time.

Only its reading part: its enforcer takes the limit, counts and compares one after the other, so
that requests that come at once pass together; here the count is part of the transaction that adds
to it. Section [oslo_limit] has its own options, as in other services; without ``auth_type`` there,
Kilonova logs in as [identity] says. The token must be one for the whole cloud: with another
Keystone leaves limits out and says nothing of it.

Each question is asked by one thread however many wait for it, and they wait for a moment only;
after three failures in a row nothing is asked for two seconds. What is not known is
``Unavailable``, never "no limit".
"""

from __future__ import annotations

import logging
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

LOG = logging.getLogger(__name__)
WAIT = 5.0  # seconds that a request waits for its limits
READ = 5  # seconds that the identity service has for each answer
AT_ONCE, MOST = 4, 10000  # questions at once; projects whose limits are remembered
EVERYBODY = "*"  # stands for no project: the registered limits
GROUP = "oslo_limit"
NO_LIMITS = "The identity service does not tell the limits of this project; try again later."
NOT_INSTALLED = "[quota] driver = unified needs oslo.limit: pip install 'kilonova[unified-limits]'"
NOT_SYSTEM = (
    "[oslo_limit] has no system_scope = all: Keystone would leave other projects' limits out"
)


class Reader(Protocol):
    """The part of oslo.limit's enforcer that reads; None asks for all resources."""

    def get_registered_limits(
        self, resources_to_check: Collection[str] | None
    ) -> list[tuple[str, int]]: ...

    def get_project_limits(
        self, project_id: str, resource_names: Collection[str] | None
    ) -> list[tuple[str, int]]: ...


class UnifiedLimits:
    """Limits by resource name; made after the process has forked. Thread-safe.

    Args:
        seconds: how long an answer is believed, from when it was asked for.
        wait: seconds that callers wait for one.
        reader: opens the way to the identity service.
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
        # oldest first; (since, …)
        self._known: OrderedDict[str, tuple[float, dict[str, int]]] = OrderedDict()
        self._coming: dict[str, tuple[float, Future[dict[str, int]]]] = {}
        self._reader: Reader | None = None
        self._pool = ThreadPoolExecutor(AT_ONCE, "limits")

    def of(self, project_id: str) -> Mapping[str, int]:
        """The limits of a project: its own before the registered ones; of '*' the registered ones.

        Raises:
            Unavailable: they are not known, and the identity service does not tell them now.
        """
        try:
            asked = [self._ask(name) for name in dict.fromkeys((EVERYBODY, project_id))]
            return {name: limit for answer in asked for name, limit in answer().items()}
        except Exception as problem:
            raise errors.Unavailable(NO_LIMITS) from problem

    def close(self) -> None:
        """What is being asked ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, name: str) -> Callable[[], dict[str, int]]:
        """What gives the answer: at once when it is known, else when it has come."""
        with self._lock:
            since, known = self._known.get(name, (float("-inf"), {}))
            if self._monotonic() < since + self._seconds:
                return lambda: known
            if name not in self._coming:
                if self._breaker.is_open():
                    raise errors.Unavailable(NO_LIMITS)
                now = self._monotonic()
                self._coming[name] = now, self._pool.submit(self._fetch, name, now)
            asked, future = self._coming[name]
        return lambda: future.result(timeout=max(0.0, asked + self._wait - self._monotonic()))

    def _fetch(self, name: str, now: float) -> dict[str, int]:
        """Ask, and remember the answer."""
        found: dict[str, int] | None = None
        try:
            reader = self._opened()
            found = dict(
                reader.get_registered_limits(None)
                if name == EVERYBODY
                else reader.get_project_limits(name, None)
            )
            return found
        except Exception as problem:
            LOG.warning(
                "cannot read limits from the identity service: %s: %s",
                type(problem).__name__,
                problem,
            )
            raise
        finally:
            self._breaker.record(answered=found is not None)
            with self._lock:
                del self._coming[name]
                if found is not None:
                    self._known[name] = now, found
                    self._known.move_to_end(name)
                    while len(self._known) > MOST:
                        self._known.popitem(last=False)

    def _opened(self) -> Reader:
        """One way for all; several questions at the beginning wait for the first."""
        with self._opening:
            if self._reader is None:
                self._reader = self._open()
            return self._reader


def configured(conf: cfg.ConfigOpts) -> UnifiedLimits | None:
    """As [quota] says; None: our own limits are in force.

    Raises:
        ConfigError: oslo.limit is not there.
    """
    if conf.quota.driver != "unified":
        return None
    try:
        _default(conf)
    except ImportError as problem:
        raise ConfigError(NOT_INSTALLED) from problem
    return UnifiedLimits(conf.quota.unified_limits_cache_seconds, _through_oslo)


def _default(conf: cfg.ConfigOpts) -> None:
    """Make oslo.limit's options known, with what [identity] says as their defaults."""
    from keystoneauth1 import loading
    from oslo_limit import limit  # noqa: F401  # which makes its options known when it is imported

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
        if found := getattr(section, name, None):
            tls.of_neighbour(conf, f"[{GROUP}] {name}", found)


def _through_oslo() -> Reader:
    """oslo.limit, logged in."""
    from oslo_limit import limit

    enforcer = limit.Enforcer(lambda project_id, resources: {}, cache=False)
    session: Any = enforcer.connection.session
    if not session.auth.get_access(session).system_scoped:
        raise ConfigError(NOT_SYSTEM)
    return cast(Reader, enforcer)  # which takes None for all resources too
