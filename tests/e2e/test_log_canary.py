# SPDX-License-Identifier: Apache-2.0
"""What is secret stands in no log, at DEBUG too, and in no row that keeps it in clear (ST-36)."""

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

#: What a tenant or a caller says once and nobody may read again.
KINDS = ("adminPass", "rebuilt", "rescued", "changed", "file", "user_data", "metadata_password")


@pytest.fixture
def talkative(in_memory: Live) -> Iterator[Live]:
    """Every process writes down what it can."""
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
    with in_memory.configured(*own, DEFAULT={"log_level": "DEBUG"}):
        yield in_memory


def logs(live: Live) -> str:
    return "\n".join(
        path.read_text(errors="replace") for path in sorted((live.home / "log").iterdir())
    )


def database(live: Live) -> str:
    """All rows of all tables, as text."""
    return "\n".join(
        str(row)
        for table in schema.metadata.sorted_tables
        for row in live.rows(str(sa.select(table).compile()))
    )


def life(live: Live, rest: Rest, canary: dict[str, str]) -> dict[str, str]:
    """A server goes through what takes secrets; what the API made up itself is added to the
    canaries."""

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    made = rest.call(
        "POST",
        "/servers",
        {
            "server": {
                "name": "canary",
                "imageRef": live.image("empty"),
                "flavorRef": live.flavor(),
                "adminPass": canary["adminPass"],
                "user_data": encoded(canary["user_data"]),
                "personality": [{"path": "/etc/secret", "contents": encoded(canary["file"])}],
            }
        },
        version="2.1",
    ).body["server"]
    server = made["id"]
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
    found = {
        "private key": pair["private_key"].splitlines()[3],
        "token": str(rest.session.headers["X-Auth-Token"]),
    }
    url = consoles.get("remote_console", {}).get("url", "")
    return found | (
        {"console token": url.rsplit("token%3D", 1)[-1].rsplit("token=", 1)[-1]} if url else {}
    )


def test_no_secret_is_in_a_log_or_in_clear_in_the_database(talkative: Live) -> None:
    canary = {kind: f"Canary-{secrets.token_hex(12)}" for kind in KINDS}
    canary |= life(talkative, talkative.rest(), canary)
    canary |= {f"password {name}": talkative.cloud.password(name) for name in PASSWORDS}
    written = {"logs": logs(talkative), "database": database(talkative)}
    shapes = {
        name: (secret, base64.b64encode(secret.encode()).decode().rstrip("="))
        for name, secret in canary.items()
    }
    assert [
        (name, place)
        for name, forms in shapes.items()
        for form in forms
        for place, text in written.items()
        if form in text
    ] == []
    assert " DEBUG " in written["logs"] and len(written["database"]) > 1000
