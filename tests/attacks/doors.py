# SPDX-License-Identifier: Apache-2.0
"""What somebody who reaches the services tries: patterns, bodies, words, forged headers, slow
connections, wrong passwords. Meanwhile others are answered within a second."""

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

from tests.attacks.target import ADMIN, DEMO, Door, Outcome, Target
from tests.fuzz import raw
from tests.surface.disguises import disguises

#: seconds for others; rounds, one of which counts; requests each
WITHIN, ROUNDS, ASKED = (
    1.0,
    3,
    10,
)
HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
BODY = b"POST /servers HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
WHOLE = HEAD + b"Connection: close\r\n\r\n"
#: What each says, and how many there are.
CLIENTS = {
    "16 half-open headers": (HEAD, 16),
    "40 slow bodies": (BODY, 40),
    "1,300 idle connections": (b"", 1300),
}
SLOW_DOORS = ("api", "placement", "metadata")
#: An engine that backtracks does not end with these; one that unfolds them has no room.
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
#: Clients of a busy project; requests of another project, and the limit of their p95 in seconds.
BUSY_CLIENTS, OTHERS, OTHERS_P95 = 32, 40, 0.5


def worst(door: Door) -> float:
    """Of some requests of somebody else, seconds; the best of some rounds, for the machine has
    other work."""
    found = []
    for _ in range(ROUNDS):
        found.append(max(door.ask(WHOLE)[1] for _ in range(ASKED)))
        if found[-1] < WITHIN:
            break
    return min(found)


def slow_clients(target: Target) -> Iterator[Outcome]:
    """Clients that never finish hold nobody up."""
    for name in SLOW_DOORS:
        door = target.doors[name]
        for what, (said, number) in CLIENTS.items():
            with ExitStack() as opened:
                for _ in range(number):
                    opened.enter_context(door.connect(said))
                yield _within(f"{name}: {what}", worst(door))


def _status(target: Target, path: str) -> tuple[object, float]:
    """What is answered, and after how many seconds."""
    begun = time.monotonic()
    try:
        status: object = target.call("GET", path, timeout=20).status_code
    except OSError as problem:
        status = problem
    return status, time.monotonic() - begun


def _within(attack: str, seconds: float) -> Outcome:
    return Outcome(attack, f"others wait {seconds:.1f} s" if seconds >= WITHIN else "")


def patterns(target: Target) -> Iterator[Outcome]:
    """A GET by a tenant costs others nothing."""
    door = target.doors["api"]
    for query in QUERIES:
        for pattern in PATTERNS:
            attack = f"api: {query}{pattern}"
            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(_status, target, query + quote(pattern, safe=""))
                others = worst(door)
            status, seconds = asking.result()
            if status not in (200, 400) or seconds > 5:
                yield Outcome(attack, f"answered {status} after {seconds:.1f} s")
            else:
                yield _within(attack, others)


def busy_project(target: Target) -> Iterator[Outcome]:
    """A project that lists its servers without a pause does not delay another project."""
    door, stop = target.doors["api"], threading.Event()

    def request(cloud: str) -> bytes:
        token = target.token(cloud)["value"]
        return (
            f"GET /v2.1/servers/detail HTTP/1.1\r\nHost: x\r\nX-Auth-Token: {token}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()

    def repeat() -> None:
        while not stop.is_set():
            door.ask(request(DEMO))

    with ThreadPoolExecutor(BUSY_CLIENTS) as pool:
        busy = [pool.submit(repeat) for _ in range(BUSY_CLIENTS)]
        try:
            rounds = [
                sorted(door.ask(request(ADMIN))[1] for _ in range(OTHERS)) for _ in range(ROUNDS)
            ]
        finally:
            stop.set()
    for each in busy:
        each.result()
    p95 = min(times[OTHERS * 95 // 100] for times in rounds)
    broken = f"p95 of another project is {p95:.1f} s" if p95 >= OTHERS_P95 else ""
    yield Outcome(f"api: {BUSY_CLIENTS} lists of one project at a time", broken)


def bodies(target: Target) -> Iterator[Outcome]:
    """JSON of any depth is refused, in JSON, by who may not ask and by who may."""
    deep = {
        "lists": b"[" * DEPTH + b"]" * DEPTH,
        "objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        "below a server": b'{"server": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    }
    placement = target.doors["placement"]
    urls = {
        "api": f"{target.url('compute')}/servers",
        "placement": f"http://{_host(placement)}/resource_providers",
        "identity": f"{target.identity_url}/auth/tokens",
        "image": f"{target.url('image')}/v2/images",
        "network": f"{target.url('network')}/v2.0/networks",
    }
    for service, url in urls.items():
        if not url.startswith("http"):
            yield Outcome(f"{service}: deep JSON", untried="the catalogue does not name it")
            continue
        for what, body in deep.items():
            answer = target.session.post(
                url,
                data=body,
                headers={
                    "X-Auth-Token": target.token(ADMIN)["value"],
                    "Content-Type": "application/json",
                },
                timeout=30,
            )
            yield _refusal(f"{service}: deep JSON, {what}", answer.status_code, answer.headers)


#: Bodies of nearly 1 MiB that are refused, by what is expensive about them.
LARGE = {
    "lists": b'{"server":[' + b"[]," * 300_000 + b"[]]}",
    "items": b'{"server":{"name":"x","flavorRef":"1","security_groups":['
    + b'{"name":"a"},' * 60_000
    + b"7]}}",
    "keys": b'{"server":{' + b",".join(b'"k%d":1' % key for key in range(80_000)) + b"}}",
}
SENDERS, SECONDS = 12, 5.0


def large_bodies(target: Target) -> Iterator[Outcome]:
    """Refused bodies of 1 MiB, many at a time, cost others nothing."""
    door = target.doors["api"]
    for what, body in LARGE.items():
        until = time.monotonic() + SECONDS
        with ThreadPoolExecutor(SENDERS) as pool:
            sending = [pool.submit(_send_until, target, body, until) for _ in range(SENDERS)]
            others = worst(door)
        statuses = {status for one in sending for status in one.result()}
        if statuses <= {400, 413}:
            yield _within(f"api: large bodies, {what}", others)
        else:
            yield Outcome(f"api: large bodies, {what}", f"answered {statuses}")


def _send_until(target: Target, body: bytes, until: float) -> set[int]:
    statuses = set()
    while time.monotonic() < until:
        statuses.add(target.call("POST", "/servers", data=body).status_code)
    return statuses


def numbers(target: Target) -> Iterator[Outcome]:
    """Numbers of more digits than Python reads are refused."""
    server = {"name": "x", "flavorRef": "1", "imageRef": "", "networks": "none"}
    for name in ("min_count", "max_count"):
        for text in ("9" * 4301, "0" * 5000 + "1"):
            body = {"server": {**server, name: text}}
            answer = target.call("POST", "/servers", body)
            yield _refusal(f"api: {name} of {len(text)} digits", answer.status_code, answer.headers)


def long_names(target: Target) -> Iterator[Outcome]:
    """A refusal repeats the beginning of a long name only."""
    name = "k" * 7000
    for path in ("/servers/", "/flavors/", "/os-server-groups/", "/os-keypairs/"):
        answer = target.call("GET", path + name)
        is_short = 400 <= answer.status_code < 500 and len(answer.content) < 2500
        size = f"answered {answer.status_code}, {len(answer.content)} bytes"
        yield Outcome(f"api: long name below {path}", "" if is_short else size)


def _host(door: Door) -> str:
    return f"[{door.address}]:{door.port}" if ":" in door.address else f"{door.address}:{door.port}"


def _refusal(attack: str, status: int, headers: object) -> Outcome:
    kind = str(getattr(headers, "get", lambda *_: "")("Content-Type"))
    is_one = 400 <= status < 500 and "json" in kind
    return Outcome(attack, "" if is_one else f"answered {status} {kind}")


def words(target: Target) -> Iterator[Outcome]:
    """Letters beyond latin-1 in a tag are taken, control characters in tags and names refused."""
    with target.server() as server:
        for tag in ("Ж", "\N{SNOWMAN}", "日本語", "\U0001f600", "é"):
            answer = target.call("PUT", f"/servers/{server}/tags/{quote(tag)}", cloud=ADMIN)
            place = answer.headers.get("Location", "")
            is_well = answer.status_code in (201, 204) and place.isascii() and quote(tag) in place
            yield Outcome(
                f"api: the tag {tag}", "" if is_well else f"answered {answer.status_code} {place!r}"
            )
        for sign in ("\n", "\r\nX-Forged: 1", "\x00", "\x1b[31m", "\x7f"):
            answer = target.call("PUT", f"/servers/{server}/tags/{quote('a' + sign)}", cloud=ADMIN)
            if "X-Forged" in answer.headers:
                yield Outcome(f"api: {sign!r} in a tag", "it made a header")
            else:
                yield _refusal(f"api: {sign!r} in a tag", answer.status_code, answer.headers)
            answer = target.call(
                "PUT", f"/servers/{server}", {"server": {"name": f"a{sign}b"}}, cloud=ADMIN
            )
            yield _refusal(f"api: {sign!r} in a name", answer.status_code, answer.headers)


def raw_requests(target: Target) -> Iterator[Outcome]:
    """Requests that can be counted in two ways are refused at every door of ours, and none is
    answered by a page or a crash."""
    for door in target.doors.values():
        wrong = []
        for name, said in raw.REFUSED.items():
            found = raw.answers(_said(door, said))
            if [one.status for one in found] not in raw.REFUSALS:
                wrong.append(f"{name}: {[one.status for one in found]}")
            wrong += raw.faults(found)
        yield Outcome(f"{door.name}: {len(raw.REFUSED)} ambiguous requests", "; ".join(wrong))


def _said(door: Door, said: bytes) -> bytes:
    came = b""
    with suppress(ConnectionResetError, BrokenPipeError), door.connect() as client:
        client.sendall(said)
        if door.proof is None:
            client.shutdown(socket.SHUT_WR)
        while piece := client.recv(65536):
            came += piece
    return came


def forged_headers(target: Target) -> Iterator[Outcome]:
    """Nobody says by headers who they are."""
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
    placement = target.doors["placement"]
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
    """However a path is written, nothing is answered without a token.

    Paths go out as they stand here, because a client library would clean them.
    """
    doors = {
        "api": ("/v2.1/flavors", "/v2.1/os-keypairs", "/v2.1/os-availability-zone"),
        "placement": ("/resource_providers", "/traits"),
        "image-gateway": ("/v2/images/0",),
        "metadata": ("/latest/user-data",),
    }
    for name, paths in doors.items():
        found = []
        for path in chain.from_iterable(map(disguises, paths)):
            said = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            came = target.doors[name].ask(said.encode())[0]
            status = came.split(b"\r\n")[0].split(b" ")[1:2]
            if status != [b"300"] and not (status and status[0].startswith(b"4")):
                found.append(f"GET {path}: {came[:200]!r}")
        yield Outcome(f"{name}: disguised paths without a token", "; ".join(found))


def metadata(target: Target) -> Iterator[Outcome]:
    """Who has no secret is told nothing of any guest."""
    door = target.doors["metadata"]
    servers = target.call("GET", "/servers?all_tenants=1", cloud=ADMIN).json()["servers"]
    guest = servers[0]["id"] if servers else "0" * 8
    for what, lines in {
        "without a signature": "",
        "with one that is made up": f"X-Instance-ID-Signature: {'0' * 64}\r\n",
        "in a host's name": f"X-Instance-ID-Signature: {'0' * 64}\r\n"
        f"X-Instance-Host: {target.hosts[-1].name}\r\n",
    }.items():
        said = (
            f"GET /latest/user-data HTTP/1.1\r\nHost: x\r\nX-Instance-ID: {guest}\r\n"
            f"X-Tenant-ID: a\r\nX-Forwarded-For: 10.0.0.1\r\n{lines}Connection: close\r\n\r\n"
        )
        status = door.ask(said.encode())[0].split(b"\r\n")[0]
        is_refused = status.split(b" ")[1:2] in ([b"403"], [b"404"], [b"400"])
        yield Outcome(f"metadata: {what}", "" if is_refused else f"answered {status!r}")


def passwords(target: Target) -> Iterator[Outcome]:
    """Guesses are slowed down, and their time tells nobody who exists."""
    known = f"attacked-{secrets.token_hex(4)}"
    users, admin = f"{target.identity_url}/users", {"X-Auth-Token": target.token(ADMIN)["value"]}
    asked = {"user": {"name": known, "password": secrets.token_hex(16), "domain_id": "default"}}
    made = target.session.post(users, json=asked, headers=admin, timeout=30)
    made.raise_for_status()
    try:
        yield from _guesses(target, known)
    finally:
        target.session.delete(f"{users}/{made.json()['user']['id']}", headers=admin, timeout=30)


def _guesses(target: Target, known: str) -> Iterator[Outcome]:
    times: dict[str, list[float]] = {known: [], f"no-{known}": []}
    answers: dict[str, list[int]] = {name: [] for name in times}
    for _ in range(12):
        for name in times:
            answer = target.prove(name, "wrong")
            answers[name].append(answer.status_code)
            if answer.status_code == 401:
                times[name].append(answer.elapsed.total_seconds())
    for name, statuses in zip(("one who exists", "nobody"), answers.values(), strict=True):
        is_slowed = 429 in statuses and not {*statuses} - {401, 429}
        yield Outcome(
            f"identity: wrong passwords of {name}", "" if is_slowed else f"answered {statuses}"
        )
    one, other = (statistics.median(each) for each in times.values())
    yield Outcome(
        "identity: who exists, by the time of the answer",
        f"{one:.3f} s and {other:.3f} s" * (not 0.5 < one / other < 2),
    )
