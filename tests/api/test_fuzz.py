# SPDX-License-Identifier: Apache-2.0
"""Requests that no client should send, over every route of every service: none may be answered in
one of the ways that tests/fuzz/verdict.py knows. ``./deploy/test fuzz`` sends many more."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz import requests, run, verdict
from tests.fuzz.requests import Answer
from tests.surface.world import World

SEED = int(os.environ.get("KILONOVA_FUZZ_SEED", "2026"))


@pytest.mark.parametrize("count", [800, pytest.param(2000, marks=pytest.mark.slice("operations"))])
def test_no_request_is_answered_as_none_may_be(
    world: World, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    with capsys.disabled():
        print(f"\n{count} requests by chance, seed {SEED}")
    failures = list(run.find_failures(world, SEED, range(count)))
    assert not failures, "\n\n".join(str(failure) for failure in failures[:10])


def test_a_request_of_a_seed_is_the_same_again(world: World) -> None:
    assert [requests.make(world, 1, number) for number in range(50)] == [
        requests.make(world, 1, number) for number in range(50)
    ]
    assert requests.make(world, 1, 0) != requests.make(world, 2, 0)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "headers", "body", "said"),
    [
        (500, JSON, b"{}", "status 500"),
        (502, JSON, b"{}", "status 502"),
        (404, JSON, b"<html></html>", "a page"),
        (200, {"content-type": "text/html"}, b"x", "a page"),
        (503, {"content-type": "text/plain"}, b"no", "without JSON"),
        (400, JSON, b'{"x": "Traceback (most recent call last)"}', "insides"),
        (400, JSON, b'{"x": "near SELECT id FROM servers"}', "insides"),
        (409, JSON, b'{"x": "KeyError: 1"}', "insides"),
        (400, JSON, b'{"x": "open /tmp/a"}', "insides"),
        (400, JSON, b'"' + b"x" * 9000 + b'"', "a refusal of"),
        (200, {**JSON, "location": "a\r\nX: y"}, b"{}", "cannot be sent"),
        (200, JSON, b"{", "without JSON"),
    ],
)
def test_what_may_not_be_is_seen(
    world: World, status: int, headers: dict[str, str], body: bytes, said: str
) -> None:
    asked = replace(requests.make(world, 1, 1), persona="member", headers=(), body=b"", target="/x")
    [fault, *_] = verdict.faults(world, asked, Answer(status, headers, body, 0.0), "")
    assert said in fault
    assert verdict.faults(world, asked, Answer(404, JSON, b'{"itemNotFound": {}}', 0.0), "") == []


def test_a_foreign_record_is_seen(world: World) -> None:
    asked = next(
        made
        for made in (requests.make(world, 1, number) for number in range(1000))
        if made.operation.service == "compute" and made.persona == "member"
    )
    foreign = world.sites["compute"].ids["foreign"]["servers"]
    body = f'{{"id": "{foreign}"}}'.encode()
    asked = replace(asked, target="/servers", headers=(), body=b"")
    assert verdict.faults(world, asked, Answer(200, JSON, body, 0.0), "") == [
        "tells of a foreign record: servers",
        "tells of a foreign record: os-volumes_boot",
    ]
    assert verdict.faults(world, replace(asked, body=body), Answer(200, JSON, body, 0.0), "") == []
    assert (
        verdict.faults(world, replace(asked, persona="admin"), Answer(200, JSON, body, 0.0), "")
        == []
    )


def test_time_and_the_log_are_bounded(world: World) -> None:
    asked = requests.make(world, 1, 1)
    assert "seconds" in verdict.faults(world, asked, Answer(200, JSON, b"{}", 9.0), "")[0]
    assert "logged" in verdict.faults(world, asked, Answer(200, JSON, b"{}", 0.0), "x" * 20_000)[0]


def test_the_command_sends_the_same_request_again(tmp_path: Path, world: World) -> None:
    """After those before it, as far as to where everything was set back."""
    made = requests.make(world, 9, 2 * run.BLOCK + 1)
    failure = run.Failure(9, 2 * run.BLOCK + 1, made, ("status 500",), "")
    assert f"./deploy/test fuzz -- --seed 9 --only {2 * run.BLOCK + 1}" in str(failure)
    assert run.failures_of(world, 9, 2 * run.BLOCK + 1) == []
