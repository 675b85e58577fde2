# SPDX-License-Identifier: Apache-2.0
"""What tests need that is not Python: servers, each test with a database of its own on them, and what a machine can do.

``./deploy/test`` starts the servers and names them in KILONOVA_TEST_{RABBITMQ,POSTGRESQL,MARIADB}_URL; below it a
missing one is a failure, and so is a missing program, for it has installed them. Elsewhere (``pytest tests/contract``)
such tests are skipped and say which command runs them. Everywhere a test is skipped that needs what this machine does
not allow: the fixtures that make namespaces, mounts and bridges ``demand`` them first.
"""
from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from deploy import machine

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


def demand(*abilities: machine.Ability, programs: Sequence[str] = (), ring: str = "contract") -> None:
    """Skip what needs this of a machine that cannot do it, with its reason, or that has not these programs."""
    lack = machine.lack_of(*abilities)
    if lack is not None:
        pytest.skip(lack.what)
    missing = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if not missing:
        return
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail(f"not installed: {', '.join(missing)}")
    pytest.skip(f"not installed: {', '.join(missing)}; run: ./deploy/test {ring}")


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """A broker, shared by all tests: take topics and hosts of your own."""
    return server("rabbitmq")


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
