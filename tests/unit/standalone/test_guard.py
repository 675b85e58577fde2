# SPDX-License-Identifier: Apache-2.0
"""Authentication in an embedded service while the identity service does not answer."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path

from falcon.testing import TestClient

from deploy.one_machine.services.guard import add_authentication, add_identity_options, identity_of
from deploy.one_machine.services.volume import app
from deploy.one_machine.services.volume.caller import is_open


def test_embedded_service_returns_503_in_ten_seconds_when_identity_hangs(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_identity_options(parser)
    (tmp_path / "password").write_text("p")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v3"
        words = ["--auth-url", url, "--password-file", str(tmp_path / "password")]
        application = app.build(None)  # type: ignore[arg-type]
        client = TestClient(
            add_authentication(application, identity_of(parser.parse_args(words)), is_open)
        )
        began = time.monotonic()
        answer = client.simulate_get("/v3/volumes", headers={"X-Auth-Token": "a"})
    assert answer.status_code == 503
    assert "The identity service does not answer" in answer.text
    assert time.monotonic() - began < 10
