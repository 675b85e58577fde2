# SPDX-License-Identifier: Apache-2.0
"""External services that accept connections and never answer. The API answers with 503 in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from common.domain import errors
from common.service import config
from compute_api.compute import service

#: Seconds in which a user gets the answer 503.
LIMIT_SECONDS = 10.0


@pytest.fixture
def identity() -> Iterator[Any]:
    """Yield a catalogue whose services hang."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        names = ("image_url", "network_url", "share_url", "volume_url")
        yield SimpleNamespace(**{name: lambda: url for name in names})


@pytest.mark.slice("operations")
def test_request_to_hanging_external_service_is_unavailable_within_limit(identity: Any) -> None:
    conf = config.load()
    requests: dict[str, Callable[[], object]] = {
        "image": lambda: service.image_client(identity).show("i", "token"),
        "network": lambda: service.network_client(conf, identity).networks("token", "p"),
        "share": lambda: service.share_client(conf, identity).share("token", "s"),
        "volume": lambda: service.volume_client(conf, identity).volume("token", "v"),
    }

    def measure(request: Callable[[], object]) -> float:
        began = time.monotonic()
        with pytest.raises(errors.Unavailable, match="does not answer; try again later"):
            request()
        return time.monotonic() - began

    with ThreadPoolExecutor(len(requests)) as pool:
        seconds = dict(zip(requests, pool.map(measure, requests.values()), strict=True))
    assert max(seconds.values()) < LIMIT_SECONDS, seconds
