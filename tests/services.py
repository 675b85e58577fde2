# SPDX-License-Identifier: Apache-2.0
"""Servers, databases, programs and machine abilities that tests require.

``./deploy/test`` starts the servers, sets KILONOVA_TEST_{RABBITMQ,POSTGRESQL,MARIADB}_URL and
installs the programs. There, a missing server or program fails the test. In other runs, for example
``pytest tests/contract``, such a test is skipped with the command that runs it. A test that needs
an ability that the machine lacks, for example mounts, is always skipped (``demand``).
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from common.store.engine import Store
from deploy.one_machine.machine import abilities as machine
from tests.schemas import Server, upgrade

DATABASES = ("sqlite", "postgresql", "mariadb")


def server(kind: str, ring: str = "contract") -> str:
    """Return the URL of the server rabbitmq, postgresql or mariadb, or skip the test."""
    variable = f"KILONOVA_TEST_{kind.upper()}_URL"
    url = os.environ.get(variable)
    if url:
        return url
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail(f"{variable} is not set: let its job name {kind!r} in deploy/testing/plan.py")
    pytest.skip(f"needs {kind}; run: ./deploy/test {ring}")


def demand(
    *abilities: machine.Ability, programs: Sequence[str] = (), ring: str = "contract"
) -> None:
    """Skip the test, with the reason, if the machine lacks an ability or a program."""
    lack = machine.lack_of(*abilities)
    if lack is not None:
        pytest.skip(lack.what)
    missing = [
        name
        for name in programs
        if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    if not missing:
        return
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail(f"not installed: {', '.join(missing)}")
    pytest.skip(f"not installed: {', '.join(missing)}; run: ./deploy/test {ring}")


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """Return the URL of a broker shared by all tests. Use unique topics and hosts."""
    return server("rabbitmq")


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], Server]]:
    """Yield a function that returns the ``Server`` of a kind, for example "mariadb"."""
    started: dict[str, Server] = {}

    def find(kind: str) -> Server:
        if kind not in started:
            started[kind] = Server(server(kind))
        return started[kind]

    yield find
    for started_server in started.values():
        started_server.close()


@pytest.fixture
def new_database(
    servers: Callable[[str], Server], tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """Yield a function that creates an empty database of a kind and returns its URL.

    For example, ``new_database("mariadb")``. The databases are dropped after the test.
    """
    databases: list[tuple[Server, str]] = []

    def make(kind: str) -> str:
        if kind == "sqlite":
            return _file(tmp_path)
        databases.append((servers(kind), servers(kind).create()))
        return databases[-1][1]

    yield make
    for database_server, url in databases:
        database_server.drop(url)


@pytest.fixture
def upgraded_database(
    servers: Callable[[str], Server], tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns the URL of a database with the newest schema.

    The argument is the kind, as for ``new_database``.
    """
    databases: list[tuple[Server, str]] = []

    def lend(kind: str) -> str:
        if kind == "sqlite":
            store = Store(_file(tmp_path))
            upgrade(store)
            store.close()
            return str(store.url)
        databases.append((servers(kind), servers(kind).lend()))
        return databases[-1][1]

    yield lend
    for database_server, url in databases:
        database_server.take_back(url)


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """Return the URL of an empty database. The test runs once on each kind."""
    return new_database(request.param)


@pytest.fixture(
    params=[pytest.param("sqlite", marks=pytest.mark.slice("operations")), "postgresql", "mariadb"]
)
def upgraded_url(request: pytest.FixtureRequest, upgraded_database: Callable[[str], str]) -> str:
    """Return the URL of a database with the newest schema. The test runs once on each kind.

    By default SQLite is left out, because the other rings run on SQLite.
    """
    return upgraded_database(request.param)


def _file(folder: Path) -> str:
    return f"sqlite:///{folder / uuid.uuid4().hex}.db"
