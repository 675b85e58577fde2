# SPDX-License-Identifier: Apache-2.0
"""What tests need that is not Python: servers, each test with a database of its own on them, and
what a machine can do.

``./deploy/test`` starts the servers and names them in
KILONOVA_TEST_{RABBITMQ,POSTGRESQL,MARIADB}_URL; below it a missing one is a failure, and so is a
missing program, for it has installed them. Elsewhere (``pytest tests/contract``) such tests are
skipped and say which command runs them. Everywhere a test is skipped that needs what this machine
does not allow: the fixtures that make namespaces, mounts and bridges ``demand`` them first.
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
    """The URL of rabbitmq, postgresql or mariadb."""
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
    """Skip what needs this of a machine that cannot do it, with its reason, or that has not these
    programs."""
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
    """A broker, shared by all tests: take topics and hosts of your own."""
    return server("rabbitmq")


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], Server]]:
    """``servers("mariadb")``: the databases of this process on it."""
    made: dict[str, Server] = {}

    def find(kind: str) -> Server:
        if kind not in made:
            made[kind] = Server(server(kind))
        return made[kind]

    yield find
    for one in made.values():
        one.close()


@pytest.fixture
def new_database(
    servers: Callable[[str], Server], tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """``new_database("mariadb")`` makes an empty database of this kind and returns its URL; it is
    dropped at the test's end."""
    made: list[tuple[Server, str]] = []

    def make(kind: str) -> str:
        if kind == "sqlite":
            return _file(tmp_path)
        made.append((servers(kind), servers(kind).create()))
        return made[-1][1]

    yield make
    for one, url in made:
        one.drop(url)


@pytest.fixture
def upgraded_database(
    servers: Callable[[str], Server], tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """As ``new_database``, but it has the newest schema."""
    lent: list[tuple[Server, str]] = []

    def lend(kind: str) -> str:
        if kind == "sqlite":
            store = Store(_file(tmp_path))
            upgrade(store)
            store.close()
            return str(store.url)
        lent.append((servers(kind), servers(kind).lend()))
        return lent[-1][1]

    yield lend
    for one, url in lent:
        one.take_back(url)


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """An empty database; the test runs once on each kind."""
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
