# SPDX-License-Identifier: Apache-2.0
"""Attacks at the services of a cloud over the network.

They send expensive patterns, bodies, numbers, words, forged headers, slow connections and wrong
passwords. During the attacks, other clients must get their answers within a second.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain
from urllib.parse import quote

from tests.attacks.target import ADMIN, DEMO, Endpoint, Outcome, Target
from tests.fuzz import raw
from tests.surface.disguises import disguises

#: Limit in seconds for the requests of other clients, rounds of these, and requests of a round.
MAX_SECONDS, ROUNDS, REQUESTS = 1.0, 3, 10
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
BODY = b"POST /servers HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
WHOLE = HEAD + b"Connection: close\r\n\r\n"
#: Title of an attack -> the bytes that each client sends, and the number of clients.
CLIENTS = {
    "16 half-open headers": (HEAD, 16),
    "40 slow bodies": (BODY, 40),
    "1,300 idle connections": (b"", 1300),
}
SLOW_SERVICES = ("api", "placement", "metadata")
#: Expensive regular expressions. With these, a backtracking engine does not end, and an engine that
#: expands repetitions runs out of memory.
PATTERNS = (
    "(?:(?:(?:^){60000}){60000}){60000}",
    "(((((a{50}){50}){50}){50}){50})",
    "(a+)+$",
    "(a|a)*b",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(?=(a+))\\1$",
)
QUERIES = ("/flavors?name=", "/servers?name=", "/servers/detail?ip=", "/servers/detail?ip6=")
DEPTH = 100_000
#: Clients of a busy project, requests of another project, and the limit of their p95 in seconds.
BUSY_CLIENTS, OTHERS, OTHERS_P95 = 32, 40, 0.5


def measure_slowest_request(endpoint: Endpoint) -> float:
    """Return the duration in seconds of the slowest of some requests of another client.

    The result is the minimum of up to ``ROUNDS`` rounds, because the machine may have other work.
    """
    durations = []
    for _ in range(ROUNDS):
        durations.append(max(endpoint.send(WHOLE)[1] for _ in range(REQUESTS)))
        if durations[-1] < MAX_SECONDS:
            break
    return min(durations)


def slow_clients(target: Target) -> Iterator[Outcome]:
    """Open many connections with unfinished requests, which must not delay other clients."""
    for name in SLOW_SERVICES:
        endpoint = target.endpoints[name]
        for title, (data, number) in CLIENTS.items():
            with ExitStack() as connections:
                for _ in range(number):
                    connections.enter_context(endpoint.connect(data))
                yield _judge_delay(f"{name}: {title}", measure_slowest_request(endpoint))


def _get_status(target: Target, path: str) -> tuple[object, float]:
    """Return the status of a GET, or the exception, and the duration in seconds."""
    start = time.monotonic()
    try:
        status: object = target.call("GET", path, timeout=20).status_code
    except OSError as problem:
        status = problem
    return status, time.monotonic() - start


def _judge_delay(attack: str, seconds: float) -> Outcome:
    """Return the outcome of an attack during which another client waited this long."""
    return Outcome(attack, f"others wait {seconds:.1f} s" if seconds >= MAX_SECONDS else "")


def patterns(target: Target) -> Iterator[Outcome]:
    """Filter lists by expensive regular expressions, which must not delay other clients."""
    endpoint = target.endpoints["api"]
    for query in QUERIES:
        for pattern in PATTERNS:
            attack = f"api: {query}{pattern}"
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(_get_status, target, query + quote(pattern, safe=""))
                delay = measure_slowest_request(endpoint)
            status, seconds = answer.result()
            if status not in (200, 400) or seconds > 5:
                yield Outcome(attack, f"answered {status} after {seconds:.1f} s")
            else:
                yield _judge_delay(attack, delay)


def busy_project(target: Target) -> Iterator[Outcome]:
    """List the servers of a project without a pause, which must not delay another project."""
    endpoint, stop = target.endpoints["api"], threading.Event()

    def request(cloud: str) -> bytes:
        token = target.token(cloud)["value"]
        return (
            f"GET /v2.1/servers/detail HTTP/1.1\r\nHost: x\r\nX-Auth-Token: {token}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()

    def repeat() -> None:
        while not stop.is_set():
            endpoint.send(request(DEMO))

    with ThreadPoolExecutor(BUSY_CLIENTS) as pool:
        busy = [pool.submit(repeat) for _ in range(BUSY_CLIENTS)]
        try:
            rounds = [
                sorted(endpoint.send(request(ADMIN))[1] for _ in range(OTHERS))
                for _ in range(ROUNDS)
            ]
        finally:
            stop.set()
    for future in busy:
        future.result()
    p95 = min(times[OTHERS * 95 // 100] for times in rounds)
    broken = f"p95 of another project is {p95:.1f} s" if p95 >= OTHERS_P95 else ""
    yield Outcome(f"api: {BUSY_CLIENTS} lists of one project at a time", broken)


def bodies(target: Target) -> Iterator[Outcome]:
    """Send deep JSON, which each service must refuse with an error in JSON."""
    deep = {
        "lists": b"[" * DEPTH + b"]" * DEPTH,
        "objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        "below a server": b'{"server": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    }
    placement = target.endpoints["placement"]
    urls = {
        "api": f"{target.url('compute')}/servers",
        "placement": f"http://{_host(placement)}/resource_providers",
        "identity": f"{target.identity_url}/auth/tokens",
        "image": f"{target.url('image')}/v2/images",
        "network": f"{target.url('network')}/v2.0/networks",
    }
    for service, url in urls.items():
        if not url.startswith("http"):
            yield Outcome(f"{service}: deep JSON", untried="the catalogue has no such service")
            continue
        for shape, body in deep.items():
            answer = target.session.post(
                url,
                data=body,
                headers={
                    "X-Auth-Token": target.token(ADMIN)["value"],
                    "Content-Type": "application/json",
                },
                timeout=30,
            )
            attack = f"{service}: deep JSON, {shape}"
            yield _expect_refusal(attack, answer.status_code, answer.headers)


#: Invalid bodies of nearly 1 MiB, by the kind of their many parts.
LARGE = {
    "lists": b'{"server":[' + b"[]," * 300_000 + b"[]]}",
    "items": b'{"server":{"name":"x","flavorRef":"1","security_groups":['
    + b'{"name":"a"},' * 60_000
    + b"7]}}",
    "keys": b'{"server":{' + b",".join(b'"k%d":1' % key for key in range(80_000)) + b"}}",
}
SENDERS, SECONDS = 12, 5.0


def large_bodies(target: Target) -> Iterator[Outcome]:
    """Send invalid bodies of 1 MiB from many clients, which must not delay other clients."""
    endpoint = target.endpoints["api"]
    for kind, body in LARGE.items():
        until = time.monotonic() + SECONDS
        with ThreadPoolExecutor(SENDERS) as pool:
            senders = [pool.submit(_send_until, target, body, until) for _ in range(SENDERS)]
            delay = measure_slowest_request(endpoint)
        statuses = {status for sender in senders for status in sender.result()}
        if statuses <= {400, 413}:
            yield _judge_delay(f"api: large bodies, {kind}", delay)
        else:
            yield Outcome(f"api: large bodies, {kind}", f"answered {statuses}")


def _send_until(target: Target, body: bytes, until: float) -> set[int]:
    statuses = set()
    while time.monotonic() < until:
        statuses.add(target.call("POST", "/servers", data=body).status_code)
    return statuses


def numbers(target: Target) -> Iterator[Outcome]:
    """Send integers with more digits than Python converts, which the API must refuse."""
    server = {"name": "x", "flavorRef": "1", "imageRef": "", "networks": "none"}
    for name in ("min_count", "max_count"):
        for text in ("9" * 4301, "0" * 5000 + "1"):
            body = {"server": {**server, name: text}}
            answer = target.call("POST", "/servers", body)
            attack = f"api: {name} of {len(text)} digits"
            yield _expect_refusal(attack, answer.status_code, answer.headers)


def long_names(target: Target) -> Iterator[Outcome]:
    """Request resources with long names, of which an error may repeat only the beginning."""
    name = "k" * 7000
    for path in ("/servers/", "/flavors/", "/os-server-groups/", "/os-keypairs/"):
        answer = target.call("GET", path + name)
        is_short = 400 <= answer.status_code < 500 and len(answer.content) < 2500
        size = f"answered {answer.status_code}, {len(answer.content)} bytes"
        yield Outcome(f"api: long name below {path}", "" if is_short else size)


def _host(endpoint: Endpoint) -> str:
    """Return address and port as in a URL."""
    address, port = endpoint.address, endpoint.port
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _expect_refusal(attack: str, status: int, headers: object) -> Outcome:
    """Return the outcome, which is broken unless the status is 4xx and the body is JSON."""
    kind = str(getattr(headers, "get", lambda *_: "")("Content-Type"))
    is_refused = 400 <= status < 500 and "json" in kind
    return Outcome(attack, "" if is_refused else f"answered {status} {kind}")


def words(target: Target) -> Iterator[Outcome]:
    """Send unusual characters in tags and names.

    The API must accept letters beyond latin-1 in a tag, and refuse control characters.
    """
    with target.create_server() as server:
        for tag in ("Ж", "\N{SNOWMAN}", "日本語", "\U0001f600", "é"):
            answer = target.call("PUT", f"/servers/{server}/tags/{quote(tag)}", cloud=ADMIN)
            place = answer.headers.get("Location", "")
            is_correct = (
                answer.status_code in (201, 204) and place.isascii() and quote(tag) in place
            )
            yield Outcome(
                f"api: the tag {tag}",
                "" if is_correct else f"answered {answer.status_code} {place!r}",
            )
        for sign in ("\n", "\r\nX-Forged: 1", "\x00", "\x1b[31m", "\x7f"):
            answer = target.call("PUT", f"/servers/{server}/tags/{quote('a' + sign)}", cloud=ADMIN)
            attack = f"api: {sign!r} in a tag"
            if "X-Forged" in answer.headers:
                yield Outcome(attack, "the tag added a header to the response")
            else:
                yield _expect_refusal(attack, answer.status_code, answer.headers)
            answer = target.call(
                "PUT", f"/servers/{server}", {"server": {"name": f"a{sign}b"}}, cloud=ADMIN
            )
            yield _expect_refusal(f"api: {sign!r} in a name", answer.status_code, answer.headers)


def raw_requests(target: Target) -> Iterator[Outcome]:
    """Send ambiguous requests to each endpoint, which must refuse them without a fault."""
    for endpoint in target.endpoints.values():
        problems = []
        for name, data in raw.REFUSED.items():
            answers = raw.answers(_send_raw(endpoint, data))
            if [answer.status for answer in answers] not in raw.REFUSALS:
                problems.append(f"{name}: {[answer.status for answer in answers]}")
            problems += raw.faults(answers)
        attack = f"{endpoint.name}: {len(raw.REFUSED)} ambiguous requests"
        yield Outcome(attack, "; ".join(problems))


def _send_raw(endpoint: Endpoint, data: bytes) -> bytes:
    """Send bytes, without TLS also the end of the stream, and return the answer."""
    received = b""
    with suppress(ConnectionResetError, BrokenPipeError), endpoint.connect() as client:
        client.sendall(data)
        if endpoint.tls_files is None:
            client.shutdown(socket.SHUT_WR)
        while piece := client.recv(65536):
            received += piece
    return received


def forged_headers(target: Target) -> Iterator[Outcome]:
    """Claim an identity by the headers of the token middleware, without a token."""
    project = target.token(DEMO)["project"]["id"]
    forged = {
        "X-Identity-Status": "Confirmed",
        "X-Roles": "admin",
        "X-Project-Id": project,
        "X-User-Id": "a",
        "X-Service-Identity-Status": "Confirmed",
        "X-Service-Roles": "service",
        "OpenStack-API-Version": "compute 2.96",
    }
    placement = target.endpoints["placement"]
    urls = {
        "api": f"{target.url('compute')}/servers",
        "placement": f"http://{_host(placement)}/resource_providers",
        "image": f"{target.url('image')}/v2/images",
        "network": f"{target.url('network')}/v2.0/ports",
        "identity": f"{target.identity_url}/users",
    }
    for service, url in urls.items():
        if url.startswith("http"):
            status = target.session.get(url, headers=forged, timeout=30).status_code
            yield Outcome(
                f"{service}: forged identity headers", "" if status == 401 else f"answered {status}"
            )


def disguised_paths(target: Target) -> Iterator[Outcome]:
    """Send other spellings of paths without a token, which must not get an answer of a resource.

    The requests are raw bytes, because a client library would normalize the paths.
    """
    paths_by_service = {
        "api": ("/v2.1/flavors", "/v2.1/os-keypairs", "/v2.1/os-availability-zone"),
        "placement": ("/resource_providers", "/traits"),
        "image-gateway": ("/v2/images/0",),
        "metadata": ("/latest/user-data",),
    }
    for name, paths in paths_by_service.items():
        problems = []
        for path in chain.from_iterable(map(disguises, paths)):
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            answer = target.endpoints[name].send(request.encode())[0]
            status = answer.split(b"\r\n")[0].split(b" ")[1:2]
            if status != [b"300"] and not (status and status[0].startswith(b"4")):
                problems.append(f"GET {path}: {answer[:200]!r}")
        yield Outcome(f"{name}: disguised paths without a token", "; ".join(problems))


def metadata(target: Target) -> Iterator[Outcome]:
    """Request a guest's user data without the secret of the metadata proxy."""
    endpoint = target.endpoints["metadata"]
    servers = target.call("GET", "/servers?all_tenants=1", cloud=ADMIN).json()["servers"]
    guest = servers[0]["id"] if servers else "0" * 8
    for title, lines in {
        "without a signature": "",
        "with a wrong signature": f"X-Instance-ID-Signature: {'0' * 64}\r\n",
        "in a host's name": f"X-Instance-ID-Signature: {'0' * 64}\r\n"
        f"X-Instance-Host: {target.hosts[-1].name}\r\n",
    }.items():
        request = (
            f"GET /latest/user-data HTTP/1.1\r\nHost: x\r\nX-Instance-ID: {guest}\r\n"
            f"X-Tenant-ID: a\r\nX-Forwarded-For: 10.0.0.1\r\n{lines}Connection: close\r\n\r\n"
        )
        status = endpoint.send(request.encode())[0].split(b"\r\n")[0]
        is_refused = status.split(b" ")[1:2] in ([b"403"], [b"404"], [b"400"])
        yield Outcome(f"metadata: {title}", "" if is_refused else f"answered {status!r}")


def passwords(target: Target) -> Iterator[Outcome]:
    """Guess passwords of an existing and of a missing user.

    The identity service must limit the guesses, and the times of its answers must not show which
    user exists.
    """
    existing = f"attacked-{secrets.token_hex(4)}"
    users, admin = f"{target.identity_url}/users", {"X-Auth-Token": target.token(ADMIN)["value"]}
    body = {"user": {"name": existing, "password": secrets.token_hex(16), "domain_id": "default"}}
    answer = target.session.post(users, json=body, headers=admin, timeout=30)
    answer.raise_for_status()
    try:
        yield from _guess_passwords(target, existing)
    finally:
        target.session.delete(f"{users}/{answer.json()['user']['id']}", headers=admin, timeout=30)


def _guess_passwords(target: Target, existing: str) -> Iterator[Outcome]:
    times: dict[str, list[float]] = {existing: [], f"no-{existing}": []}
    answers: dict[str, list[int]] = {name: [] for name in times}
    for _ in range(12):
        for name in times:
            answer = target.authenticate(name, "wrong")
            answers[name].append(answer.status_code)
            if answer.status_code == 401:
                times[name].append(answer.elapsed.total_seconds())
    for user, statuses in zip(("an existing", "a missing"), answers.values(), strict=True):
        is_limited = 429 in statuses and not {*statuses} - {401, 429}
        yield Outcome(
            f"identity: wrong passwords of {user} user",
            "" if is_limited else f"answered {statuses}",
        )
    existing_seconds, missing_seconds = (statistics.median(values) for values in times.values())
    yield Outcome(
        "identity: existence of a user, by the time of the answer",
        f"{existing_seconds:.3f} s and {missing_seconds:.3f} s"
        * (not 0.5 < existing_seconds / missing_seconds < 2),
    )
