# SPDX-License-Identifier: Apache-2.0
"""HTTP access to an external service, shared by the clients of this package.

If a service cannot be reached, does not answer in time, fails internally or requests a later try,
the error is ``Unavailable``: the effect of the request is unknown, and the caller tries again
later. All other refusals are definite. This is the only place that maps HTTP status codes to
errors. After three failures in a row the *breaker* is open: for two seconds requests fail without
being sent, so that a dead service costs its callers no time. keystoneauth is imported at first use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypedDict, Unpack

from common.domain import errors
from common.domain.json_types import JsonObject, JsonValue
from common.service import tracing
from common.service.log import get_logger, request_id

if TYPE_CHECKING:
    from keystoneauth1.session import Session
    from requests import PreparedRequest, Response

log = get_logger(__name__)
#: Failures in a row that open a breaker, and the seconds for which the breaker then stays open.
FAILURES, PAUSE = 3, 2.0
#: Upper limit for a service's Retry-After.
MAX_WAIT_SECONDS = 10.0

#: Transient refusals: time-out, locked, too early, too many requests.
NOT_NOW = frozenset((408, 423, 425, 429))
#: Status of a definite refusal -> error. Every other definite refusal is a Conflict.
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
    """Return True for a transient status (408, 423, 425, 429, 5xx). A retry may succeed."""
    return status >= 500 or status in NOT_NOW


def kind_of(status: int) -> type[errors.Problem]:
    """Return the class of the error for a status that is no success.

    A transient status is Unavailable, and so is a redirection that was not followed, because the
    service has not answered. A refusal without an entry in ``REFUSALS`` is a Conflict.
    """
    if is_not_now(status) or status < 400:
        return errors.Unavailable
    return REFUSALS.get(status, errors.Conflict)


def refusal_of(answer: HttpAnswer, name: str, needs: str) -> errors.Problem:
    """Return the error for a response with a refusal. The caller raises the error.

    Status 401 is Unauthorized and 406 is Conflict, both with a fixed text. Otherwise ``kind_of``
    returns the class, and the text contains the service's message, which is in the first value of
    the JSON body, or the status if the body has no message.

    Args:
        answer: The response.
        name: The service's name, for example "block storage service".
        needs: The required API version and its purpose. The text for status 406 contains this.
    """
    if answer.status_code == 401:
        return errors.Unauthorized(f"The {name} does not accept the token.")
    if answer.status_code == 406:
        return errors.Conflict(f"The {name} does not know version {needs}.")
    try:
        message = next(iter(answer.json().values()))["message"]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        message = f"it answered {answer.status_code}"
    return kind_of(answer.status_code)(f"The {name} says: {message}"[:500])


def require_answer(url: str, seconds: float = 2) -> None:
    """Check that a service answers at this URL. No token is sent, so a refusal counts as an answer.

    Args:
        url: The URL.
        seconds: Time limit for the connection, and again for each part of the response.

    Raises:
        Unavailable: The service does not answer, or answers with a transient status.
    """
    import requests

    try:
        status = requests.get(url, timeout=seconds, allow_redirects=False).status_code
    except requests.RequestException as problem:
        raise errors.Unavailable("The service does not answer; check that it runs.") from problem
    if is_not_now(status):
        raise errors.Unavailable(f"The service answers {status}; see its log.")


class RequestOptions(TypedDict, total=False):
    """Options of a request, which are passed to keystoneauth.

    ``connect_retries`` is the number of repetitions after a failed connection. ``Http.send`` uses 0
    for a POST and 1 otherwise, unless the option is given.
    """

    headers: Mapping[str, str]
    params: Mapping[str, str]
    json: object
    data: object
    stream: bool
    timeout: float | tuple[float, float]
    connect_retries: int


class HttpAnswer(Protocol):
    """The used part of a response. A response of requests matches this protocol."""

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
    """The JSON object in a response. Reading a missing key by ``[]`` raises Unavailable."""

    def __init__(self, content: JsonObject, name: str) -> None:
        super().__init__(content)
        self._name = name

    def __missing__(self, part: str) -> NoReturn:
        raise _unreadable(self._name, f"without {part}")


def document(answer: HttpAnswer, name: str) -> Document:
    """Return the JSON object in a response, or an empty object if the response has no body.

    Reading a key that the result lacks raises Unavailable too.

    Args:
        answer: The response.
        name: The service's name, for the error.

    Raises:
        Unavailable: The body is not a JSON object, because the transfer broke off or another
            program answers at this address. The effect of the request is unknown.
    """
    try:
        content: Any = answer.json() if answer.content else {}
        if not isinstance(content, dict):
            raise TypeError(f"the body is a {type(content).__name__}")
    except (ValueError, TypeError) as problem:
        raise _unreadable(name, "with a body that is no JSON object") from problem
    return Document(content, name)


def _unreadable(name: str, content: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"The {name} answered {content}; try again later, or check which program answers at its address."
    )


def wait_of(answer: HttpAnswer) -> float:
    """Return the seconds in a response's Retry-After, at most ``MAX_WAIT_SECONDS``.

    Return 0 without this header, or if the header is not a whole number, for example a date.
    """
    retry_after = str(answer.headers.get("Retry-After", "")).strip()
    return (
        min(float(retry_after), MAX_WAIT_SECONDS)
        if retry_after.isascii() and retry_after.isdigit()
        else 0.0
    )


@dataclass
class Breaker:
    """Stops requests to a service for ``PAUSE`` seconds after ``FAILURES`` failures in a row.

    The caller checks ``is_open`` before each request, and calls ``record`` after it. Thread-safe.
    """

    monotonic: Callable[[], float] = time.monotonic
    _failures: int = 0
    _open_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def is_open(self) -> bool:
        """Return True if no request may be sent now, because the last ``FAILURES`` requests failed.

        After ``PAUSE`` seconds one caller gets False, to try a request. Other callers get True for
        another ``PAUSE`` seconds, unless ``record`` receives a success before.
        """
        with self._lock:
            if self._failures < FAILURES:
                return False
            if self.monotonic() < self._open_until:
                return True
            self._open_until = self.monotonic() + PAUSE
            return False

    def record(self, answered: bool) -> None:
        """Count a failed request and restart the pause, or reset the count after a success.

        Args:
            answered: False if the service was unreachable or failed.
        """
        with self._lock:
            self._failures = 0 if answered else self._failures + 1
            if not answered:
                self._open_until = self.monotonic() + PAUSE


def refuse_plain_text(session: Session, refusal: Callable[[str], str]) -> Session:
    """Make a keystoneauth session refuse plain HTTP to URLs for which ``refusal`` returns a reason.

    Redirections and URLs from the catalogue are checked too. A refused request logs the reason and
    fails like a connection that cannot be opened.

    Args:
        session: The session, which is changed.
        refusal: Returns the reason to refuse an http:// URL, or an empty text to permit the URL.

    Returns:
        The same session.
    """
    from keystoneauth1.session import TCPKeepAliveAdapter
    from requests.exceptions import ConnectionError as Refused

    class Judge(TCPKeepAliveAdapter):
        def send(self, request: PreparedRequest, *arguments: Any, **more: Any) -> Response:  # noqa: ANN401 - passed on unchanged
            if reason := refusal(request.url or ""):
                log.error(
                    "a request to an external service is refused, because it is plain HTTP",
                    problem=reason,
                )
                raise Refused(reason)
            return super().send(request, *arguments, **more)

    session.session.adapters["http://"] = Judge()
    return session


def _trace() -> Mapping[str, str]:
    """Return the header that makes a service's spans part of the current request's trace.

    Return no header if the current request is not traced.
    """
    parent = tracing.traceparent(request_id.get()) if tracing.spans else None
    return {"traceparent": parent} if parent else {}


def not_registered(name: str, section: str) -> errors.Unavailable:
    """Return the error for a service that is neither configured nor in the catalogue.

    Args:
        name: The service's name, for example "image service".
        section: The section of the configuration in which the endpoint can be set.
    """
    return errors.Unavailable(
        f"The catalogue names no {name}; register it or set [{section}] endpoint."
    )


@dataclass
class OptionalService:
    """A client of a service that a cloud may lack.

    The URL is looked up for each request, so that a service can be registered without a restart.

    Args:
        endpoint: The URL, or a function that returns the URL or None. None: the cloud lacks the
            service.
        timeout: Seconds until the first byte of a response.
    """

    endpoint: str | Callable[[], str | None] | None
    timeout: float = 10
    #: The service's name in sentences.
    service_name: ClassVar[str]
    #: The service's section in the configuration.
    section: ClassVar[str]

    def has_service(self) -> bool:
        """Return True if the service's URL is configured or in the catalogue.

        Raises:
            Unavailable: The catalogue cannot be read, or the URL in the catalogue is plain HTTP to
                another machine.
        """
        return bool(self._find_url())

    def _base(self) -> str:
        """Return the service's URL without a slash at the end.

        Raises:
            Unavailable: The cloud lacks the service, the catalogue cannot be read, or the URL in
                the catalogue is plain HTTP to another machine.
        """
        if not (url := self._find_url()):
            raise not_registered(self.service_name, self.section)
        return url.rstrip("/")

    def _find_url(self) -> str | None:
        return self.endpoint() if callable(self.endpoint) else self.endpoint


@dataclass
class Http:
    """HTTP access to a service.

    Args:
        name: The service's name in sentences, for example "network service".
        endpoint: The URL, or a function that returns the URL.
        timeout: Seconds until the first byte of a response.
        breaker: Stops requests after several failures in a row.
        verify: The file of the authority that signs the service's certificate. True: the
            authorities of the system.
    """

    name: str
    endpoint: str | Callable[[], str]
    timeout: float = 10
    breaker: Breaker = field(default_factory=Breaker)
    verify: bool | str = True
    _session: Session | None = field(default=None, repr=False)

    def base(self) -> str:
        """Return the service's URL without a slash at the end.

        Errors of a function ``endpoint`` are passed on.
        """
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
        """Send a request and return the response, unless its status is transient.

        A definite refusal, for example 404, is returned too: the caller checks the status.

        Args:
            method: The HTTP method.
            url: The whole URL.
            token: The token of the user for whom the request is sent.
            refusal: Returns True if a response with a transient status is a definite refusal. Such
                a response is returned.
            **more: Further options of the request.

        Raises:
            Unavailable: No response came, the breaker is open, or the status is transient. Only in
                the last case the error contains the seconds of the service's Retry-After.
        """
        from keystoneauth1 import exceptions

        if self.breaker.is_open():
            raise errors.Unavailable(f"The {self.name} does not answer; try again later.")
        # A POST without a response may have created an object. A second POST would create another.
        options: JsonObject = {"connect_retries": 0 if method == "POST" else 1, **more}
        options["headers"] = {"X-Auth-Token": token, **_trace(), **options.get("headers", {})}
        try:
            answer = self._request(url, method, options)
        except (exceptions.ClientException, OSError) as problem:
            self.breaker.record(answered=False)
            raise errors.Unavailable(
                f"The {self.name} does not answer; try again later."
            ) from problem
        is_definite = not is_not_now(answer.status_code) or refusal(answer)
        self.breaker.record(answered=is_definite or answer.status_code < 500)
        if not is_definite:
            raise errors.Unavailable(
                f"The {self.name} answered {answer.status_code}; try again later.", wait_of(answer)
            )
        return answer

    def _request(self, url: str, method: str, options: JsonObject) -> HttpAnswer:
        """Send a request, and repeat it after a failed connection. A timeout is not repeated.

        keystoneauth would repeat a request after a timeout too, which doubles the caller's wait for
        a service that hangs.
        """
        from keystoneauth1 import exceptions

        retries = options.pop("connect_retries")
        while True:
            try:
                answer: HttpAnswer = self._http().request(
                    url,
                    method,
                    raise_exc=False,
                    log=False,
                    authenticated=False,
                    connect_retries=0,
                    **options,
                )
            except exceptions.ConnectFailure:
                if retries == 0:
                    raise
                retries -= 1
            else:
                return answer

    def _refusal(self, url: str) -> str:
        """Return the reason to refuse an http:// URL. Empty if the service's own URL is no https://.

        Invariant: a service with an https URL is never accessed by plain HTTP.
        """
        return (
            f"the {self.name} redirects from https:// to {url[:200]}, and Kilonova refuses plain HTTP"
            if (self.base().startswith("https://"))
            else ""
        )

    def _http(self) -> Session:
        if self._session is None:
            from keystoneauth1 import session

            self._session = refuse_plain_text(
                session.Session(timeout=self.timeout, verify=self.verify), self._refusal
            )
        return self._session
