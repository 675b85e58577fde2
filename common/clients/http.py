# SPDX-License-Identifier: Apache-2.0
"""One process's way to a neighbour over HTTP, shared by the clients of this package.

A neighbour that cannot be reached, does not answer in time or fails inside is ``Unavailable``: what became of the
request is not known. After three such answers in a row the *breaker* is open: for two seconds nothing is even tried,
so that a dead neighbour costs its callers no time. keystoneauth is imported at first use.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common import errors

FAILURES, PAUSE = 3, 2.0


@dataclass
class Breaker:
    """Counts failures in a row. Thread-safe."""

    monotonic: Callable[[], float] = time.monotonic
    _failures: int = 0
    _open_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def is_open(self) -> bool:
        """Should nothing be tried now? When the pause is over one caller tries; the others wait for it."""
        with self._lock:
            if self._failures < FAILURES:
                return False
            if self.monotonic() < self._open_until:
                return True
            self._open_until = self.monotonic() + PAUSE
            return False

    def heard(self, answered: bool) -> None:
        """What became of a try."""
        with self._lock:
            self._failures = 0 if answered else self._failures + 1
            if not answered:
                self._open_until = self.monotonic() + PAUSE


@dataclass
class Http:
    """A neighbour: its name in sentences ("network service"), where it is, and seconds for an answer to begin."""

    name: str
    endpoint: str | Callable[[], str]
    timeout: float = 10
    breaker: Breaker = field(default_factory=Breaker)
    _session: Any = field(default=None, repr=False)

    def base(self) -> str:
        """Its URL without a slash at the end."""
        return (self.endpoint if isinstance(self.endpoint, str) else self.endpoint()).rstrip("/")

    def send(self, method: str, url: str, token: str, *, headers: Mapping[str, str] | None = None,
             refusal: Callable[[Any], bool] = lambda answer: False, **more: Any) -> Any:
        """The answer, whatever its status below 500; above, one that is a ``refusal`` in spite of its status.

        Raises:
            Unavailable: there is none, or the neighbour failed inside.
        """
        from keystoneauth1 import exceptions
        if self.breaker.is_open():
            raise errors.Unavailable(f"The {self.name} does not answer; try again later.")
        try:
            answer = self._http().request(url, method, headers={"X-Auth-Token": token, **(headers or {})},
                                          raise_exc=False, log=False, authenticated=False,
                                          **{"connect_retries": 1, **more})
        except (exceptions.ClientException, OSError) as problem:
            self.breaker.heard(answered=False)
            raise errors.Unavailable(f"The {self.name} does not answer; try again later.") from problem
        failed = answer.status_code >= 500 and not refusal(answer)
        self.breaker.heard(answered=not failed)
        if failed:
            raise errors.Unavailable(f"The {self.name} answered {answer.status_code}; try again later.")
        return answer

    def _http(self) -> Any:
        if self._session is None:
            from keystoneauth1 import session
            self._session = session.Session(timeout=self.timeout)
        return self._session
