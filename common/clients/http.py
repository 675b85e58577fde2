# SPDX-License-Identifier: Apache-2.0
"""One process's way to a neighbour over HTTP, shared by the clients of this package.

A neighbour that cannot be reached, does not answer in time, fails inside or says "not now" is
``Unavailable``: what became of the request is not known, and it is made again later. Any other
refusal is definite. Which status means what is said here and nowhere else. After three failures in
a row the *breaker* is open: for two seconds nothing is even tried, so that a dead neighbour costs
its callers no time. keystoneauth is imported at first use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypedDict, Unpack

from common.domain import errors
from common.domain.json_types import JsonObject, JsonValue
from common.service import tracing
from common.service.log import request_id

if TYPE_CHECKING:
    from keystoneauth1.session import Session
    from requests import PreparedRequest, Response

log = logging.getLogger(__name__)
FAILURES, PAUSE = 3, 2.0
MAX_WAIT_SECONDS = 10.0  #: of what a neighbour may ask for with Retry-After

#: Refusals that another try may not meet: time-out, locked, too early, too many requests.
NOT_NOW = frozenset((408, 423, 425, 429))
#: What is refused for good, by status; every other one is a Conflict.
REFUSALS: Mapping[int, type[errors.Problem]] = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    410: errors.NotFound,
    413: errors.TooLarge,
}


def is_not_now(status: int) -> bool:
    """Says this status nothing of the request itself, so that it is to be made again later?"""
    return status >= 500 or status in NOT_NOW


def kind_of(status: int) -> type[errors.Problem]:
    """What a status that is no success means. A redirection that led nowhere is no answer of the
    service."""
    if is_not_now(status) or status < 400:
        return errors.Unavailable
    return REFUSALS.get(status, errors.Conflict)


def refusal_of(answer: HttpAnswer, name: str, needs: str) -> errors.Problem:
    """What a service of this name refuses, with its words, which stand under whatever key comes
    first. ``needs``: who needs which version of its API, where it knows no such version."""
    if answer.status_code == 401:
        return errors.Unauthorized(f"The {name} does not accept the token.")
    if answer.status_code == 406:
        return errors.Conflict(f"The {name} does not know version {needs}.")
    try:
        words = next(iter(answer.json().values()))["message"]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        words = f"it answered {answer.status_code}"
    return kind_of(answer.status_code)(f"The {name} says: {words}"[:500])


def require_answer(url: str, seconds: float = 2) -> None:
    """Raises Unavailable unless a service answers at this URL; what it answers to nobody is its
    own."""
    import requests

    try:
        status = requests.get(url, timeout=seconds, allow_redirects=False).status_code
    except requests.RequestException as problem:
        raise errors.Unavailable("It does not answer; see that it runs.") from problem
    if is_not_now(status):
        raise errors.Unavailable(f"It answers {status}; see its log.")


class RequestOptions(TypedDict, total=False):
    """How keystoneauth asks; ``connect_retries``: 1 unless said otherwise, 0 of a POST."""

    headers: Mapping[str, str]
    params: Mapping[str, str]
    json: object
    data: object
    stream: bool
    timeout: float | tuple[float, float]
    connect_retries: int


class HttpAnswer(Protocol):
    """What is read of an answer; requests' own is one."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content(self) -> bytes: ...

    @property
    def text(self) -> str: ...

    def json(self) -> JsonValue: ...

    def iter_content(self, size: int, /) -> Iterator[bytes]: ...

    def close(self) -> None: ...


class Document(dict[str, Any]):
    """What a neighbour says in an answer. A part that it lacks was never told, as when nobody
    answers."""

    def __init__(self, said: JsonObject, name: str) -> None:
        super().__init__(said)
        self._name = name

    def __missing__(self, part: str) -> NoReturn:
        raise _unreadable(self._name, f"without {part}")


def document(answer: HttpAnswer, name: str) -> Document:
    """What an answer of the neighbour of this name says; empty where it has no body.

    Raises:
        Unavailable: nobody can read it, because it broke off or somebody else answers there; what
        became of the request is not known.
    """
    try:
        said: Any = answer.json() if answer.content else {}
        return Document(dict(said), name)
    except (ValueError, TypeError) as problem:
        raise _unreadable(name, "what is no JSON object") from problem


def _unreadable(name: str, what: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"The {name} answered {what}; try again later, or see who answers at its address."
    )


def wait_of(answer: HttpAnswer) -> float:
    """The seconds that an answer's Retry-After asks for, within bounds."""
    retry_after = str(answer.headers.get("Retry-After", "")).strip()
    return (
        min(float(retry_after), MAX_WAIT_SECONDS)
        if retry_after.isascii() and retry_after.isdigit()
        else 0.0
    )


@dataclass
class Breaker:
    """Counts failures in a row. Thread-safe."""

    monotonic: Callable[[], float] = time.monotonic
    _failures: int = 0
    _open_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def is_open(self) -> bool:
        """Should nothing be tried now? When the pause is over one caller tries; the others wait for
        it."""
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


def judged(session: Session, refusal: Callable[[str], str]) -> Session:
    """keystoneauth's session that asks no plain URL for which there is a ``refusal``, not even
    after a redirection or where a catalogue has one."""
    from keystoneauth1.session import TCPKeepAliveAdapter
    from requests.exceptions import ConnectionError as Refused

    class Judge(TCPKeepAliveAdapter):
        def send(self, request: PreparedRequest, *arguments: Any, **more: Any) -> Response:  # noqa: ANN401 - passed on unchanged
            if why := refusal(request.url or ""):
                log.error("%s", why)
                raise Refused(why)
            return super().send(request, *arguments, **more)

    session.session.adapters["http://"] = Judge()
    return session


def _trace() -> Mapping[str, str]:
    """The header that makes a neighbour's spans part of the trace of the request in hand."""
    parent = tracing.traceparent(request_id.get()) if tracing.spans else None
    return {"traceparent": parent} if parent else {}


def not_registered(name: str, section: str) -> errors.Unavailable:
    """The refusal where no catalogue names this neighbour, nor its section of the configuration."""
    return errors.Unavailable(
        f"The catalogue names no {name}; register it or set [{section}] endpoint."
    )


@dataclass
class OptionalService:
    """A client of a neighbour that a cloud may lack. Where it is is asked each time, so that one
    that is registered later is used without a restart.

    Args:
        endpoint: its URL; a function may return None: the cloud has no such service.
        timeout: seconds for an answer to begin.
    """

    endpoint: str | Callable[[], str | None] | None
    timeout: float = 10
    service_name: ClassVar[str]  #: as sentences have it
    section: ClassVar[str]  #: of the configuration

    def has_service(self) -> bool:
        """Has this cloud such a service?

        Raises:
            Unavailable: the catalogue cannot be read.
        """
        return bool(self._found())

    def _base(self) -> str:
        """Its URL without a slash at the end.

        Raises:
            Unavailable: there is none, or the catalogue cannot be read.
        """
        if not (found := self._found()):
            raise not_registered(self.service_name, self.section)
        return found.rstrip("/")

    def _found(self) -> str | None:
        return self.endpoint() if callable(self.endpoint) else self.endpoint


@dataclass
class Http:
    """A neighbour: its name in sentences ("network service"), where it is, and seconds for an
    answer to begin.
    ``verify``: the file of the authority that signs its certificate, instead of those that the
    system knows."""

    name: str
    endpoint: str | Callable[[], str]
    timeout: float = 10
    breaker: Breaker = field(default_factory=Breaker)
    verify: bool | str = True
    _session: Session | None = field(default=None, repr=False)

    def base(self) -> str:
        """Its URL without a slash at the end."""
        return (self.endpoint if isinstance(self.endpoint, str) else self.endpoint()).rstrip("/")

    def send(
        self,
        method: str,
        url: str,
        token: str,
        *,
        refusal: Callable[[HttpAnswer], bool] = lambda answer: False,
        **more: Unpack[RequestOptions],
    ) -> HttpAnswer:
        """The answer, unless its status means "not now"; also then, where it is a ``refusal`` in
        spite of its status.

        Raises:
            Unavailable: there is none, the neighbour failed inside, or it does not want to be asked
            now.
        """
        from keystoneauth1 import exceptions

        if self.breaker.is_open():
            raise errors.Unavailable(f"The {self.name} does not answer; try again later.")
        # one that was not answered may be done: a second would make another thing
        options: JsonObject = {"connect_retries": 0 if method == "POST" else 1, **more}
        try:
            answer: HttpAnswer = self._http().request(
                url,
                method,
                headers={"X-Auth-Token": token, **_trace(), **options.pop("headers", {})},
                raise_exc=False,
                log=False,
                authenticated=False,
                **options,
            )
        except (exceptions.ClientException, OSError) as problem:
            self.breaker.heard(answered=False)
            raise errors.Unavailable(
                f"The {self.name} does not answer; try again later."
            ) from problem
        counts = not is_not_now(answer.status_code) or refusal(answer)
        self.breaker.heard(answered=counts or answer.status_code < 500)
        if not counts:
            raise errors.Unavailable(
                f"The {self.name} answered {answer.status_code}; try again later.", wait_of(answer)
            )
        return answer

    def _refusal(self, url: str) -> str:
        """Who is asked over TLS is never asked without."""
        return (
            f"the {self.name} leads from https:// to {url[:200]}, which is refused"
            if (self.base().startswith("https://"))
            else ""
        )

    def _http(self) -> Session:
        if self._session is None:
            from keystoneauth1 import session

            self._session = judged(
                session.Session(timeout=self.timeout, verify=self.verify), self._refusal
            )
        return self._session
