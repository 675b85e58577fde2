# SPDX-License-Identifier: Apache-2.0
"""The servers that tests use, as fixtures: each test gets a database of its own on them.

``./deploy/test`` starts the servers and names them in KILONOVA_TEST_{RABBITMQ,POSTGRESQL,MARIADB,LIBVIRT}_URL;
below it a missing one is a failure. Elsewhere (``pytest tests/contract``) such tests are skipped and say which
command runs them.
"""
from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

DATABASES = ("sqlite", "postgresql", "mariadb")


def server(kind: str, ring: str = "contract") -> str:
    """The URL of rabbitmq, postgresql, mariadb or libvirt."""
    variable = f"KILONOVA_TEST_{kind.upper()}_URL"
    url = os.environ.get(variable)
    if url:
        return url
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail(f"{variable} is not set: let this ring name {kind!r} in deploy/commands/test.py")
    pytest.skip(f"needs {kind}; run: ./deploy/test {ring}")


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """A broker, shared by all tests: take topics and hosts of your own."""
    return server("rabbitmq")


@pytest.fixture(scope="session")
def libvirt_uri() -> str:
    """A libvirtd of ours, shared by all tests: take domains of your own."""
    return server("libvirt")


@pytest.fixture
def new_database(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """``new_database("mariadb")`` makes an empty database of this kind and returns its URL; it is dropped at
    the test's end."""
    made: list[tuple[str, str]] = []

    def make(kind: str) -> str:
        name = f"kn_{uuid.uuid4().hex[:20]}"
        if kind == "sqlite":
            return f"sqlite:///{tmp_path / name}.db"
        admin = server(kind)
        _execute(admin, f"CREATE DATABASE {name}" + (" CHARACTER SET utf8mb4" if kind == "mariadb" else ""))
        made.append((admin, name))
        return sa.make_url(admin).set(database=name).render_as_string(hide_password=False)

    yield make
    for admin, name in made:
        _execute(admin, f"DROP DATABASE {name}" + (" WITH (FORCE)" if admin.startswith("postgresql") else ""))


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """An empty database; the test runs once on each kind."""
    return new_database(request.param)


def _execute(url: str, statement: str) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
