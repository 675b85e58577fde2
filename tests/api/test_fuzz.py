# SPDX-License-Identifier: Apache-2.0
"""Random requests over every route of every service, judged by tests/fuzz/verdict.py.

``./deploy/test fuzz`` sends many more.
"""

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
def test_fuzz_requests_get_no_500_html_page_internal_detail_or_foreign_id(
    world: World, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    with capsys.disabled():
        print(f"\n{count} requests by chance, seed {SEED}")
    failures = list(run.find_failures(world, SEED, range(count)))
    assert not failures, "\n\n".join(str(failure) for failure in failures[:10])


def test_fuzz_requests_are_determined_by_seed_and_number(world: World) -> None:
    assert [requests.make(world, 1, number) for number in range(50)] == [
        requests.make(world, 1, number) for number in range(50)
    ]
    assert requests.make(world, 1, 0) != requests.make(world, 2, 0)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
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
def test_fuzz_verdict_reports_server_errors_html_tracebacks_and_bad_json(
    world: World, status: int, headers: dict[str, str], body: bytes, message: str
) -> None:
    request = replace(
        requests.make(world, 1, 1), persona="member", headers=(), body=b"", target="/x"
    )
    [fault, *_] = verdict.faults(world, request, Answer(status, headers, body, 0.0), "")
    assert message in fault
    assert verdict.faults(world, request, Answer(404, JSON, b'{"itemNotFound": {}}', 0.0), "") == []


def test_fuzz_verdict_reports_record_of_another_project_in_answer(world: World) -> None:
    request = next(
        candidate
        for candidate in (requests.make(world, 1, number) for number in range(1000))
        if candidate.operation.service == "compute" and candidate.persona == "member"
    )
    foreign = world.sites["compute"].ids["foreign"]["servers"]
    body = f'{{"id": "{foreign}"}}'.encode()
    request = replace(request, target="/servers", headers=(), body=b"")
    assert verdict.faults(world, request, Answer(200, JSON, body, 0.0), "") == [
        "tells of a foreign record: servers",
        "tells of a foreign record: os-volumes_boot",
    ]
    assert (
        verdict.faults(world, replace(request, body=body), Answer(200, JSON, body, 0.0), "") == []
    )
    assert (
        verdict.faults(world, replace(request, persona="admin"), Answer(200, JSON, body, 0.0), "")
        == []
    )


def test_fuzz_verdict_reports_slow_answer_and_long_log(world: World) -> None:
    request = requests.make(world, 1, 1)
    assert "seconds" in verdict.faults(world, request, Answer(200, JSON, b"{}", 9.0), "")[0]
    assert (
        "logged" in verdict.faults(world, request, Answer(200, JSON, b"{}", 0.0), "x" * 20_000)[0]
    )


def test_fuzz_only_option_repeats_single_request_named_by_failure(
    tmp_path: Path, world: World
) -> None:
    """The requests since the last restore of the databases are sent first."""
    request = requests.make(world, 9, 2 * run.BLOCK + 1)
    failure = run.Failure(9, 2 * run.BLOCK + 1, request, ("status 500",), "")
    assert f"./deploy/test fuzz -- --seed 9 --only {2 * run.BLOCK + 1}" in str(failure)
    assert run.failures_of(world, 9, 2 * run.BLOCK + 1) == []
