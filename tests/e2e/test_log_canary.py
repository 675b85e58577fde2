# SPDX-License-Identifier: Apache-2.0
"""Secrets are in no log, also at DEBUG, and not in plain text in the database (ST-36)."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from common.store import schema
from deploy.one_machine.cloud import processes
from deploy.one_machine.cloud.cloud import PASSWORDS
from deploy.one_machine.cloud.process_control import find_process
from tests.e2e.live import Live, Rest

pytestmark = pytest.mark.slice("guests")

#: Secrets that a tenant sends.
KINDS = ("adminPass", "rebuilt", "rescued", "changed", "file", "user_data", "metadata_password")


@pytest.fixture
def debug_cloud(in_memory: Live) -> Iterator[Live]:
    """Yield a cloud with all processes at log level DEBUG."""
    names = [
        program.name
        for program in processes.programs(in_memory.cloud)
        if (find_process(in_memory.cloud, program.name))
    ]
    own = [
        name
        for name in names
        if name in ("api", "conductor", "scheduler", "placement", "image-gateway")
    ]
    with in_memory.configure(*own, DEFAULT={"log_level": "DEBUG"}):
        yield in_memory


def read_logs(live: Live) -> str:
    return "\n".join(
        path.read_text(errors="replace") for path in sorted((live.home / "log").iterdir())
    )


def read_database(live: Live) -> str:
    """Return all rows of all tables as text."""
    return "\n".join(
        str(row)
        for table in schema.metadata.sorted_tables
        for row in live.rows(str(sa.select(table).compile()))
    )


def use_secrets(live: Live, rest: Rest, canary: dict[str, str]) -> dict[str, str]:
    """Send all secrets in actions of a server, and return the secrets that the API generated."""

    def encode(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    server_body = rest.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "canary",
                "imageRef": live.image("empty"),
                "flavorRef": live.flavor(),
                "adminPass": canary["adminPass"],
                "user_data": encode(canary["user_data"]),
                "personality": [{"path": "/etc/secret", "contents": encode(canary["file"])}],
            }
        },
        version="2.1",
    ).body["server"]
    server = server_body["id"]
    rest.await_status(server, "ACTIVE")
    for body in (
        {"changePassword": {"adminPass": canary["changed"]}},
        {"rebuild": {"imageRef": live.image("empty"), "adminPass": canary["rebuilt"]}},
        {"rescue": {"adminPass": canary["rescued"]}},
    ):
        rest.call("POST", f"/servers/{server}/action", body)
        rest.await_status(server, "RESCUE" if "rescue" in body else "ACTIVE")
    pair = rest.call(
        "POST", "/os-keypairs", {"keypair": {"name": canary["file"][:8]}}, version="2.1"
    ).body["keypair"]
    rest.call("DELETE", f"/os-keypairs/{pair['name']}", version="2.1")
    consoles = rest.call(
        "POST",
        f"/servers/{server}/remote-consoles",
        {"remote_console": {"protocol": "serial", "type": "serial"}},
    ).body
    rest.call("DELETE", f"/servers/{server}")
    rest.await_gone(server)
    secrets_by_name = {
        "private key": pair["private_key"].splitlines()[3],
        "token": str(rest.session.headers["X-Auth-Token"]),
    }
    url = consoles.get("remote_console", {}).get("url", "")
    return secrets_by_name | (
        {"console token": url.rsplit("token%3D", 1)[-1].rsplit("token=", 1)[-1]} if url else {}
    )


def test_secrets_are_in_no_log_and_not_in_plain_text_in_database(debug_cloud: Live) -> None:
    canary = {kind: f"Canary-{secrets.token_hex(12)}" for kind in KINDS}
    canary |= use_secrets(debug_cloud, debug_cloud.rest(), canary)
    canary |= {f"password {name}": debug_cloud.cloud.password(name) for name in PASSWORDS}
    texts = {"logs": read_logs(debug_cloud), "database": read_database(debug_cloud)}
    shapes = {
        name: (secret, base64.b64encode(secret.encode()).decode().rstrip("="))
        for name, secret in canary.items()
    }
    assert [
        (name, place)
        for name, forms in shapes.items()
        for form in forms
        for place, text in texts.items()
        if form in text
    ] == []
    assert " DEBUG " in texts["logs"] and len(texts["database"]) > 1000
