# SPDX-License-Identifier: Apache-2.0
"""Dynamic vendor data: what the operator's own services say to each guest, as Nova's DynamicJSON
asks them.

Each target of [vendor_data] dynamic_targets gets a POST with what is known of the server, and what
it answers stands under its name in vendor_data2.json. Targets are not trusted with our time: an
answer that has not come whole within the time-outs, is too long, too deep, no JSON or a redirection
is refused, the log says so, and the guest goes without it, unless dynamic_failure_fatal says
otherwise. A call that never ends holds a thread of its own; no more than ``AT_ONCE`` do, and who
finds none free asks nothing. After three failures in a row a target is left alone for two seconds.

The token is that of the user in [vendordata_dynamic_auth], in keystoneauth's options, as in Nova;
never Kilonova's own, because a target could use it. Without that section the targets are asked
without one.
"""

from __future__ import annotations

import json
import logging
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

if TYPE_CHECKING:
    from keystoneauth1.session import Session

log = logging.getLogger(__name__)
GROUP = "vendordata_dynamic_auth"
STATIC, DYNAMIC = "static", "dynamic"
AT_ONCE, MOST_TARGETS = 8, 16
MOST_BYTES, MOST_DEPTH = 64 * 1024, 32  #: of one answer
LOGIN_SECONDS = 5  #: that the identity service has for each answer
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEADERS = {"Accept": "application/json", "User-Agent": "kilonova-vendordata"}


class _Refused(Exception):
    """What a target said, or did not say, in words for the log."""


@dataclass(frozen=True)
class Target:
    """A service that is asked, and the name that its answer has."""

    name: str
    url: str
    breaker: Breaker = field(default_factory=Breaker, compare=False, repr=False)


class Dynamic:
    """One process's way to the targets; made after the process has forked. Thread-safe.

    Args:
        session: keystoneauth's, with a user or without; ``verify``: the CAs that targets'
        certificates are checked by. connect, read: seconds to reach a target, and for each part of
        its answer; both together for all of it.
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
        """What each target says of this server, {} where it says nothing that can be used.

        Raises:
            Unavailable: a target has failed, and that is fatal.
        """
        return {target.name: self._answer(target, facts) for target in self._targets}

    def _answer(self, target: Target, facts: JsonMapping) -> JsonValue:
        try:
            return self._ask(target, json.dumps(facts).encode())
        except _Refused as problem:
            log.warning(
                "vendor data of %s for server %s: %s",
                target.name,
                facts.get("instance-id"),
                problem,
            )
            if self._is_fatal:
                raise errors.Unavailable(
                    f"The vendor data of {target.name} cannot be had."
                ) from problem
            return {}

    def _ask(self, target: Target, body: bytes) -> JsonValue:
        """Its answer, waited for no longer than both time-outs; what has not ended by then ends by
        itself."""
        if target.breaker.is_open():
            raise _Refused("it has failed three times in a row, and is left alone for a moment")
        until = time.monotonic() + self._connect + self._read
        if not self._free.acquire(timeout=self._connect):
            raise _Refused(f"{AT_ONCE} calls of this process have not been answered yet")
        box: queue.SimpleQueue[JsonValue] = queue.SimpleQueue()
        threading.Thread(
            target=self._call, args=(target, body, until, box), daemon=True, name="vendor data"
        ).start()
        try:
            found = box.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            target.breaker.record(answered=False)
            raise _Refused("its answer has not come in time") from None
        target.breaker.record(answered=not isinstance(found, _Refused))
        if isinstance(found, _Refused):
            raise found
        return found

    def _call(
        self, target: Target, body: bytes, until: float, box: queue.SimpleQueue[JsonValue]
    ) -> None:
        """In a thread of its own."""
        try:
            box.put(understood(self._post(target, body, until)))
        except _Refused as problem:
            box.put(problem)
        except Exception as problem:  # noqa: BLE001  # whatever a target makes our libraries raise is its failure
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
            found = b""
            for part in answer.iter_content(8192):
                found += part
                if len(found) > MOST_BYTES:
                    raise _Refused(f"its answer is longer than {MOST_BYTES} bytes")
                if time.monotonic() > until:
                    raise _Refused("its answer has not come in time")
        return found


def understood(answer: bytes) -> JsonValue:
    """The JSON of an answer that a guest can be given; {} for an empty one. Raises _Refused."""
    if not answer.strip():
        return {}
    try:
        found = json.loads(answer, parse_constant=_no_number)
        if _depth(found) > MOST_DEPTH:
            raise _Refused(f"its answer is deeper than {MOST_DEPTH} levels")
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise _Refused(f"its answer is deeper than {MOST_DEPTH} levels") from None
    except ValueError as problem:
        raise _Refused(f"its answer is not JSON: {str(problem)[:200]}") from problem
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _depth(value: object) -> int:
    """Levels of lists and objects, no further than what is allowed and one."""
    level: list[object] = [value]
    depth = 0
    while level and depth <= MOST_DEPTH:
        nested = [one for one in level if isinstance(one, (dict, list))]
        level = [
            item for one in nested for item in (one.values() if isinstance(one, dict) else one)
        ]
        depth += bool(nested)
    return depth


def static(conf: cfg.ConfigOpts) -> JsonObject | None:
    """What all guests are told; None: [vendor_data] providers has no static. Raises ConfigError."""
    return config.vendor_data(conf) if STATIC in conf.vendor_data.providers else None


def configured(conf: cfg.ConfigOpts) -> Dynamic | None:
    """As [vendor_data] says; None: no target is asked.

    Raises:
        ConfigError: a target, or the user in [vendordata_dynamic_auth], cannot be understood; or
        plain text would
            travel to another machine.
    """
    own = conf.vendor_data
    if DYNAMIC not in own.providers:
        return None
    targets = [_target(text) for text in own.dynamic_targets]
    for target in targets:
        tls.of_neighbour(conf, f"[vendor_data] dynamic_targets: {target.name}", target.url)
    if len({target.name for target in targets}) < len(targets) or len(targets) > MOST_TARGETS:
        raise ConfigError(
            f"[vendor_data] dynamic_targets: at most {MOST_TARGETS}, each with a name of its own"
        )
    if not targets:
        raise ConfigError(
            "[vendor_data] dynamic_targets is empty; name one as name@url, or take dynamic out of "
            "providers"
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
        where = urlsplit(url)
        is_url = (
            where.scheme in ("http", "https") and bool(where.hostname) and where.username is None
        )
    except ValueError:
        is_url = False
    if not _NAME.fullmatch(name) or name == STATIC or not is_url:
        raise ConfigError(
            f"[vendor_data] dynamic_targets: the one that begins with {name[:64]!r} must be like "
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
        tls.of_neighbour(conf, f"[{GROUP}] auth_url", own.auth_url)
    if auth is None:
        log.warning("vendor data is asked for without a token: [%s] has no auth_type", GROUP)
    return session.Session(
        auth=auth, timeout=LOGIN_SECONDS, verify=False if own.insecure else own.cafile or True
    )
