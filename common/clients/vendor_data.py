# SPDX-License-Identifier: Apache-2.0
"""Dynamic vendor data: data from the operator's services for each guest, as in Nova's DynamicJSON.

Each target in [vendor_data] dynamic_targets gets a POST with facts about the server. Its answer
appears under the target's name in vendor_data2.json. Targets may be slow or faulty: an answer that
is late, too long, too deep, not JSON or a redirection is ignored and logged, and the guest starts
without this data, unless dynamic_failure_fatal is set. A call that never ends keeps a thread. At
most ``AT_ONCE`` threads exist, and a caller without a free thread calls no target. After three
failures in a row a target is not called for two seconds.

The token is that of the user in [vendordata_dynamic_auth], with keystoneauth's options, as in Nova.
Kilonova's own token is never sent, because a target could misuse the token. Without that section no
token is sent.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from oslo_config import cfg

from common.clients.http import Breaker
from common.domain import errors
from common.domain.errors import ConfigError
from common.domain.json_types import JsonMapping, JsonObject, JsonValue
from common.security import tls
from common.service import config
from common.service.log import get_logger

if TYPE_CHECKING:
    from keystoneauth1.session import Session

log = get_logger(__name__)
GROUP = "vendordata_dynamic_auth"
STATIC, DYNAMIC = "static", "dynamic"
AT_ONCE, MOST_TARGETS = 8, 16
#: Limits of one answer.
MOST_BYTES, MOST_DEPTH = 64 * 1024, 32
#: Seconds that the identity service has for each answer.
LOGIN_SECONDS = 5
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEADERS = {"Accept": "application/json", "User-Agent": "kilonova-vendordata"}


class _Refused(Exception):
    """The reason to ignore a target's answer, for the log."""


@dataclass(frozen=True)
class Target:
    """A service of the operator, and the name of its answer in vendor_data2.json."""

    name: str
    url: str
    breaker: Breaker = field(default_factory=Breaker, compare=False, repr=False)


class Dynamic:
    """The client of the operator's services for vendor data, which are called targets.

    Created after the process has forked. Thread-safe.

    Args:
        targets: The services to call.
        session: keystoneauth's session, with or without a user.
        connect: Seconds to reach a target.
        read: Seconds for each part of an answer. A whole call may take ``connect`` plus ``read``.
        is_fatal: True if a failed target fails the request.
        verify: The file of the authorities for targets' certificates. True: the system's
            authorities.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        session: Session,
        *,
        connect: float = 5,
        read: float = 5,
        is_fatal: bool = False,
        verify: str | bool = True,
    ) -> None:
        self._targets, self._session, self._verify = tuple(targets), session, verify
        self._connect, self._read, self._is_fatal = connect, read, is_fatal
        self._free = threading.Semaphore(AT_ONCE)

    def of(self, facts: JsonMapping) -> JsonObject:
        """Return the answer of each target by name, {} for a target without a usable answer.

        Args:
            facts: The body of the requests.

        Raises:
            Unavailable: A target gave no usable answer, and ``is_fatal`` is set.
        """
        return {target.name: self._answer(target, facts) for target in self._targets}

    def _answer(self, target: Target, facts: JsonMapping) -> JsonValue:
        try:
            return self._call_with_timeout(target, json.dumps(facts).encode())
        except _Refused as problem:
            log.warning(
                "a server gets no vendor data of a target",
                target=target.name,
                server=facts.get("instance-id"),
                problem=problem,
            )
            if self._is_fatal:
                raise errors.Unavailable(
                    f"The vendor data of {target.name} cannot be read."
                ) from problem
            return {}

    def _call_with_timeout(self, target: Target, body: bytes) -> JsonValue:
        """Call a target in another thread, and return its answer.

        If the answer is late, this function does not wait for the thread, which ends later.

        Raises:
            _Refused: The target failed or is late, its breaker is open, or no thread became free
                within ``connect`` seconds.
        """
        if target.breaker.is_open():
            raise _Refused("it failed three times in a row and is not called for a moment")
        until = time.monotonic() + self._connect + self._read
        if not self._free.acquire(timeout=self._connect):
            raise _Refused(f"{AT_ONCE} calls of this process have not been answered yet")
        box: queue.SimpleQueue[JsonValue] = queue.SimpleQueue()
        threading.Thread(
            target=self._run_call, args=(target, body, until, box), daemon=True, name="vendor data"
        ).start()
        try:
            answer = box.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            target.breaker.record(answered=False)
            raise _Refused("its answer did not come in time") from None
        target.breaker.record(answered=not isinstance(answer, _Refused))
        if isinstance(answer, _Refused):
            raise answer
        return answer

    def _run_call(
        self, target: Target, body: bytes, until: float, box: queue.SimpleQueue[JsonValue]
    ) -> None:
        """Call a target, and put the answer into ``box``, or ``_Refused`` for any exception.

        Args:
            target: The target.
            body: The body of the request.
            until: Monotonic time at which the call must end.
            box: Receives one object.
        """
        try:
            box.put(parse_answer(self._post(target, body, until)))
        except _Refused as problem:
            box.put(problem)
        except Exception as problem:  # noqa: BLE001  # Each exception counts as a failure of the target.
            box.put(_Refused(f"{type(problem).__name__}: {str(problem)[:300]}"))
        finally:
            self._free.release()

    def _post(self, target: Target, body: bytes, until: float) -> bytes:
        answer = self._session.request(
            target.url,
            "POST",
            data=body,
            headers={**_HEADERS, "Content-Type": "application/json"},
            redirect=False,
            raise_exc=False,
            log=False,
            authenticated=self._session.auth is not None,
            connect_retries=0,
            stream=True,
            verify=self._verify,
            timeout=(self._connect, self._read),
        )
        with answer:
            if not 200 <= answer.status_code < 300:
                raise _Refused(f"it answered {answer.status_code}")
            content = b""
            for part in answer.iter_content(8192):
                content += part
                if len(content) > MOST_BYTES:
                    raise _Refused(f"its answer is longer than {MOST_BYTES} bytes")
                if time.monotonic() > until:
                    raise _Refused("its answer did not come in time")
        return content


def parse_answer(answer: bytes) -> JsonValue:
    """Return the JSON value of an answer, or {} for an empty answer.

    Raises:
        _Refused: The answer is not JSON, or is nested too deeply.
    """
    if not answer.strip():
        return {}
    try:
        value = json.loads(answer, parse_constant=_no_number)
        if _depth(value) > MOST_DEPTH:
            raise _Refused(f"its answer is deeper than {MOST_DEPTH} levels")
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except RecursionError:
        raise _Refused(f"its answer is deeper than {MOST_DEPTH} levels") from None
    except ValueError as problem:
        raise _Refused(f"its answer is not JSON: {str(problem)[:200]}") from problem
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _depth(value: object) -> int:
    """Return the number of levels of lists and objects, at most ``MOST_DEPTH`` plus one."""
    level: list[object] = [value]
    depth = 0
    while level and depth <= MOST_DEPTH:
        nested = [container for container in level if isinstance(container, (dict, list))]
        level = [
            item
            for container in nested
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        depth += bool(nested)
    return depth


def static(conf: cfg.ConfigOpts) -> JsonObject | None:
    """Return the content of [metadata] vendor_data_file, which is the same for all guests.

    Returns:
        {} if no file is configured. None if [vendor_data] providers does not contain "static".

    Raises:
        ConfigError: The file cannot be read, or contains no JSON object.
    """
    return config.vendor_data(conf) if STATIC in conf.vendor_data.providers else None


def configured(conf: cfg.ConfigOpts) -> Dynamic | None:
    """Return the client of the services in [vendor_data] dynamic_targets.

    Return None if [vendor_data] providers does not contain "dynamic".

    Raises:
        ConfigError: No target is configured, more than ``MOST_TARGETS``, or two with one name.
            A target or the user in [vendordata_dynamic_auth] is not valid, or plain HTTP would be
            used to another machine.
    """
    own = conf.vendor_data
    if DYNAMIC not in own.providers:
        return None
    targets = [_target(text) for text in own.dynamic_targets]
    for target in targets:
        tls.check_external_url(conf, f"[vendor_data] dynamic_targets: {target.name}", target.url)
    if len({target.name for target in targets}) < len(targets) or len(targets) > MOST_TARGETS:
        raise ConfigError(
            f"[vendor_data] dynamic_targets: give at most {MOST_TARGETS} targets, with different names"
        )
    if not targets:
        raise ConfigError(
            "[vendor_data] dynamic_targets is empty; add a target as name@url, or remove dynamic "
            "from providers"
        )
    return Dynamic(
        targets,
        _session(conf),
        connect=own.dynamic_connect_timeout,
        read=own.dynamic_read_timeout,
        is_fatal=own.dynamic_failure_fatal,
        verify=own.dynamic_ssl_certfile or True,
    )


def _target(text: str) -> Target:
    name, _, url = text.partition("@")
    try:
        parts = urlsplit(url)
        is_url = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
        )
    except ValueError:
        is_url = False
    if not _NAME.fullmatch(name) or name == STATIC or not is_url:
        raise ConfigError(
            f"[vendor_data] dynamic_targets: the target that begins with {name[:64]!r} must be like "
            "name@https://host/path, without user and password; the name has letters, digits, '_', '.' "
            f"and '-', and is not {STATIC}"
        )
    return Target(name, url)


def _session(conf: cfg.ConfigOpts) -> Session:
    from keystoneauth1 import exceptions, loading, session

    loading.register_auth_conf_options(conf, GROUP)
    loading.register_session_conf_options(conf, GROUP)
    try:
        auth = loading.load_auth_from_conf_options(conf, GROUP)
    except (exceptions.ClientException, exceptions.MissingRequiredOptions, cfg.Error) as problem:
        raise ConfigError(f"[{GROUP}] {problem}") from problem
    own = conf[GROUP]
    if auth is not None and own.auth_url:
        tls.check_external_url(conf, f"[{GROUP}] auth_url", own.auth_url)
    if auth is None:
        log.warning(
            "vendor data is requested without a token: set auth_type in the section of vendor data",
            section=GROUP,
        )
    return session.Session(
        auth=auth, timeout=LOGIN_SECONDS, verify=False if own.insecure else own.cafile or True
    )
