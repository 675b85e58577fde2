# SPDX-License-Identifier: Apache-2.0
"""Values that break careless code, and mutations of bodies with them.

All random choices come from the caller's generator.
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\x1f\x7f",
    "\x1b[31m",
    "\r\nX-Injected: yes",
    "\u2028",
    "\ufeff",
    "\u202e",
    "é",
    "日本語",
    "\U0001f600",
    "\ud800",
    "e\u0301" * 50,
    "A" * 256,
    "A" * 5000,
    "\U0001f600" * 300,
    "]]>",
    "]]><!-- &amp; &xxe; <a/>",
    "<script>alert(1)</script>",
    "%s%n{0}{x}",
    "../../etc/passwd",
    "/etc/passwd",
    "'; DROP TABLE servers; --",
    "\\",
    "%00",
    "..%2f",
    "$(id)",
    "`id`",
    "-1",
    "0",
    "1",
    "1e400",
    "NaN",
    "inf",
    "٣",
    "²",
    "१२",
    "0x10",
    "1_000",
    "9" * 20,
    "9" * 400,
    "1.5",
    "true",
    "null",
    "[]",
    "{}",
    "self",
    "__class__",
    "http://169.254.169.254/",
    "::1",
    "fe80::1%eth0",
    "10.0.0.0/33",
    "10.0.0.1/24",
    "999.1.1.1",
    "2001:db8::/129",
    "9999-12-31T23:59:59Z",
    "0001-01-01T00:00:00+14:00",
    "2026-02-30",
    "2026-01-01T00:00:00-99:99",
    "fa:16:3e:00:00:zz",
    "(a+)+$",
    "(",
    "[a-",
    "\\1",
    "$",
    "%",
    "_",
    "*",
    "in:",
    "in:a,b",
    "gt:5",
    "gte:²",
    "a:b:c:d",
    ",",
    ",,",
    ":",
    "=",
    "=x",
    "VCPU:1",
    "VCPU:²",
    "VCPU:" + "9" * 19,
    "!HW_CPU_X86_AVX",
    "member_of",
    "in:CUSTOM_A",
    "deadbeef-dead-4ead-8ead-deaddeadbeef",
    "DEADBEEFDEAD4EAD8EAD" * 2,
)
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1.5,
    -0.0,
    1e308,
    5e-324,
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [{}],
    {"x": {"x": "x"}},
)
#: Keys with a meaning in other objects.
KEYS = (
    "id",
    "project_id",
    "tenant_id",
    "user_id",
    "is_admin",
    "roles",
    "host",
    "force",
    "_x",
    "__proto__",
    "links",
    "created_at",
    "status",
    "",
    "\x00",
    "a" * 300,
    "OS-EXT-STS:vm_state",
    "_nova_check_type",
    "owner",
    "shared",
)
#: Bodies that are invalid or unusual JSON.
RAW: tuple[bytes, ...] = (
    b"",
    b" ",
    b"{",
    b"[",
    b"nul",
    b"null",
    b"0",
    b'"x"',
    b"[]",
    b"{}",
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b"\xff\xfe{}",
    b"\xef\xbb\xbf{}",
    b'{"a": "\xff"}',
    b'{"a": "\\ud800"}',
    b"\x00",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"server": {"name": "a"}, "server": null}',
    b"<?xml version='1.0'?><!DOCTYPE a [<!ENTITY x 'y'>]><a>&x;</a>",
    b'{"a": 1' + b"0" * 5000 + b"}",
    b"a=b&c=d",
    b'{"a": 1}{"a": 2}',
    b"{}\n{}",
    b'{"' + b"k" * 60_000 + b'": 1}',
)
HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Content-Type",
        (
            "",
            "text/plain",
            "application/xml",
            "application/json; charset=utf-16",
            "application/json;x",
            "multipart/form-data",
            "\xff",
            "application/octet-stream",
            "application/x-www-form-urlencoded",
            "application/openstack-images-v2.1-json-patch",
            "a" * 5000,
        ),
    ),
    (
        "Accept",
        ("", "application/xml", "*/*;q=0", "\xff", "a/b" * 500, "application/json;q=x", ";;;,,,"),
    ),
    (
        "OpenStack-API-Version",
        (
            "",
            "compute",
            "compute 2.1",
            "compute 2.999",
            "compute latest",
            "placement latest",
            "compute 2.²",
            "compute 9" * 50,
            "compute -2.1",
            "compute 2.1, placement 1.1",
            "\xff",
        ),
    ),
    ("X-OpenStack-Nova-API-Version", ("2.1", "latest", "x", "2.٣")),
    ("X-Auth-Token", ("", "x", "A" * 5000, "\xff", "é", "a,b")),
    ("X-Subject-Token", ("", "x", "\xff" * 100)),
    ("X-Service-Token", ("", "x")),
    ("X-Identity-Status", ("Confirmed",)),
    ("X-Roles", ("admin", "admin,member")),
    ("X-User-Id", ("admin",)),
    ("X-Project-Id", ("admin",)),
    ("X-Is-Admin-Project", ("True",)),
    ("X-Service-Roles", ("admin",)),
    ("X-Service-Identity-Status", ("Confirmed",)),
    ("OpenStack-System-Scope", ("all",)),
    ("X-Tenant-Id", ("admin",)),
    ("X-Role", ("admin",)),
    ("X-Domain-Id", ("default",)),
    ("X-OpenStack-Request-Id", ("x", "req-" + "0" * 900, "\xff")),
    (
        "Range",
        (
            "bytes=0-",
            "bytes=9-1",
            "bytes=-0",
            "bytes=²-",
            "bytes=0-1,3-4",
            "bytes=" + "9" * 30 + "-",
            "x",
        ),
    ),
    ("Host", ("", "a b", "[::1", "evil.example", "\xff", "a:b:c")),
    ("X-Forwarded-For", ("1", "\xff")),
    ("X-Forwarded-Proto", ("javascript",)),
    ("X-Forwarded-Host", ("evil.example",)),
    ("Forwarded", ('host="', "for=;;")),
    ("If-None-Match", ('"', "*", "W/")),
    ("If-Modified-Since", ("yesterday",)),
    ("Cookie", ("a", "=;=", "\xff")),
    ("Accept-Language", ("xx-" * 100,)),
    ("Expect", ("100-continue", "x")),
    ("Content-Encoding", ("gzip",)),
    ("X-HTTP-Method-Override", ("DELETE",)),
)
METHODS = (
    "PATCH",
    "TRACE",
    "OPTIONS",
    "HEAD",
    "PUT",
    "DELETE",
    "POST",
    "GET",
    "PROPFIND",
    "CONNECT",
)
#: Keys of nested objects in bodies and lists.
INNER = (
    "ip_address",
    "subnet_id",
    "port_id",
    "network_id",
    "mac_address",
    "start",
    "end",
    "destination",
    "nexthop",
    "id",
    "name",
    "uuid",
    "port",
    "fixed_ip",
    "tag",
    "key",
    "path",
    "contents",
    "op",
    "value",
    "domain",
    "user",
    "project",
    "password",
    "methods",
    "total",
    "reserved",
    "allocation_ratio",
    "external_fixed_ips",
    "enable_snat",
)


def value(chance: Random, record_ids: list[str]) -> Any:
    """Return a random value, sometimes the id of a record."""
    kind = chance.random()
    if kind < 0.12:
        inner = {
            chance.choice(INNER): value(chance, record_ids) for _ in range(chance.choice((1, 2, 3)))
        }
        return chance.choice((inner, [inner], [inner, inner]))
    if kind < 0.55:
        return chance.choice(TEXTS)
    if kind < 0.7:
        return chance.choice(NUMBERS)
    if kind < 0.85:
        return copy.deepcopy(chance.choice(OTHERS))
    return chance.choice(record_ids) if kind < 0.97 else deep(chance.choice((31, 33, 200)))


def deep(levels: int) -> Any:
    nested: Any = "x"
    for level in range(levels):
        nested = [nested] if level % 2 else {"x": nested}
    return nested


def mutate(body: Any, chance: Random, record_ids: list[str], fields: tuple[str, ...] = ()) -> Any:
    """Return the body with one random change.

    Args:
        body: The body, which stays unchanged.
        chance: The random generator.
        record_ids: Ids of records.
        fields: Fields of the operation, preferred for new keys.
    """
    body = copy.deepcopy(body)
    places = list(_places(body))
    if not places:
        return value(chance, record_ids)
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.55:
        holder[key] = value(chance, record_ids)
    elif kind < 0.65:
        del holder[key]
    elif kind < 0.85 and isinstance(holder, dict):
        holder[chance.choice(fields if fields and chance.random() < 0.8 else KEYS)] = value(
            chance, record_ids
        )
    elif kind < 0.9 and isinstance(holder, dict):
        holder[chance.choice(TEXTS)] = holder.pop(key)
    elif kind < 0.95:
        holder[key] = [holder[key]] * chance.choice((1, 2, 60, 1100))
    else:
        holder[key] = {"x": holder[key]}
    return body


def _places(body: Any) -> Any:
    """Yield each (object or list, key) in a body."""
    pairs = (
        body.items()
        if isinstance(body, dict)
        else enumerate(body)
        if isinstance(body, list)
        else ()
    )
    for key, inner in list(pairs):
        yield body, key
        yield from _places(inner)


def encode(body: Any) -> bytes:
    """Return the body as JSON. NaN and infinity are written, too."""
    return json.dumps(body).encode()
