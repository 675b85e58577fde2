# SPDX-License-Identifier: Apache-2.0
"""The cache of validated tokens, and an identity service that does not answer."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from webob import Request

from common.service import config
from compute_api.compute import faults
from compute_api.http import authentication


def test_token_cache_forgets_entry_after_its_time() -> None:
    now = [0.0]
    cache = authentication.TokenCache(lambda: now[0])
    cache.set("a", b"1", time=60)
    assert cache.get("a") == b"1"
    assert cache.get("b") is None
    now[0] = 60
    assert cache.get("a") is None


def test_empty_token_cache_is_truthy() -> None:
    assert authentication.TokenCache()


def test_token_cache_keeps_valid_entries_and_never_exceeds_its_limit() -> None:
    now = [0.0]
    cache = authentication.TokenCache(lambda: now[0])
    for number in range(authentication.MAX_CACHED_TOKENS):
        cache.set(str(number), b"x", time=number % 2)
    now[0] = 0.5
    cache.set("new", b"y", time=60)
    assert cache.get("1") == b"x", "those that are still good are kept while there is room"
    for number in range(2 * authentication.MAX_CACHED_TOKENS):
        cache.set(f"more{number}", b"x", time=60)
    assert len(cache) <= authentication.MAX_CACHED_TOKENS


@pytest.mark.parametrize("path", ["", "/v3"])
def test_hanging_identity_service_leads_to_503_within_ten_seconds(path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        identity = SimpleNamespace(
            auth_url=f"http://127.0.0.1:{silent.getsockname()[1]}{path}",
            username="kilonova",
            password="p",
            domain="Default",
            project_name="service",
            region="RegionOne",
            allow_plain_text=False,
        )
        conf: Any = SimpleNamespace(identity=identity, tls=SimpleNamespace(allow_plain_text=False))
        no_application: Any = None
        application = authentication.authenticate(no_application, conf, faults.body)
        start = time.monotonic()
        response = Request.blank("/", headers={"X-Auth-Token": "a"}).get_response(application)
        # This resets the options that the library registered.
        config.load()
    assert response.status_int == 503
    assert "The identity service does not answer" in response.text
    assert time.monotonic() - start < 10
