# SPDX-License-Identifier: Apache-2.0
"""Repeated bootstraps of the embedded identity service: endpoints and names of services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity import schema
from deploy.one_machine.services.identity.bootstrap import bootstrap

PASSWORDS = {"admin": "correct horse", "kilonova": "battery staple"}
IMAGE, NETWORK = {"image": "http://127.0.0.1:9292"}, {"network": "http://127.0.0.1:9696"}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    new_database = Database(tmp_path / "identity.db", schema.METADATA)
    yield new_database
    new_database.close()


def list_endpoints(database: Database) -> list[tuple[str, str]]:
    """Return type and URL of all endpoints."""
    services, endpoints = schema.services.c, schema.endpoints.c
    with database.read() as connection:
        return sorted(
            tuple(row)
            for row in connection.execute(
                select(services.type, endpoints.url).join_from(schema.services, schema.endpoints)
            )
        )


def test_bootstrap_deletes_endpoints_of_removed_service_until_it_returns(
    database: Database,
) -> None:
    image, both = [*IMAGE.items()] * 3, [*IMAGE.items()] * 3 + [*NETWORK.items()] * 3
    for endpoints, removed, expected in (
        (IMAGE | NETWORK, (), both),
        (IMAGE, (), both),
        (IMAGE, ("network",), image),
        (IMAGE, ("network",), image),
        (IMAGE | NETWORK, (), both),
    ):
        bootstrap(database, PASSWORDS, endpoints, removed)
        assert list_endpoints(database) == expected


def service_names(database: Database) -> dict[str, str]:
    """Return the names of the services in the catalogue, by type."""
    return {row.type: row.name for row in database.rows(select(schema.services))}


def test_bootstrap_names_services_as_clients_search_for_them(database: Database) -> None:
    """Masakari and libcloud search the catalogue by name, "nova", besides the type."""
    endpoints = {"compute": "http://c:8774/v2.1", "placement": "http://c:8778"}
    bootstrap(database, PASSWORDS, endpoints)
    assert service_names(database) == {"compute": "nova", "placement": "placement"}


def test_bootstrap_keeps_service_name_set_by_operator(database: Database) -> None:
    endpoints = {"compute": "http://c:8774/v2.1"}
    bootstrap(database, PASSWORDS, endpoints)
    with database.write() as connection:
        connection.execute(update(schema.services).values(name="ours"))
    bootstrap(database, PASSWORDS, endpoints)
    assert service_names(database) == {"compute": "ours"}
