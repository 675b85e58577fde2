# SPDX-License-Identifier: Apache-2.0
"""The placement service's own gabbi tests (package openstack-placement) against Kilonova.

Only the test files of that package are used. Kilonova's application answers in this process, with
one database per file. ``placement_known.toml`` lists the tests that fail, with reasons. An unlisted
failure fails here, and so does a listed test that passes. The number of passing tests is printed.
"""

from __future__ import annotations

import os
import tomllib
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from gabbi import driver

from common.store.engine import Store
from compute_api.http.policy import Policy
from compute_api.placement import app
from compute_api.placement.policies import PLACEMENT_RULES, RULES
from deploy.environment import ORACLE, ORACLE_PIN
from tests.contract import placement_worlds
from tests.schemas import Server, upgrade

GABBITS = ORACLE / "placement/tests/functional/gabbits"
KNOWN = tomllib.loads(Path(__file__).with_name("placement_known.toml").read_text())


@pytest.fixture(scope="module")
def gabbits() -> Path:
    if (ORACLE / ".pin").exists() and (ORACLE / ".pin").read_text() == ORACLE_PIN.read_text():
        return GABBITS
    if os.environ.get("KILONOVA_TEST"):
        pytest.fail(
            "the placement service's tests are not there: ./deploy/test fetches them in its first steps"
        )
    pytest.skip("needs the placement service's own tests; fetched by: ./deploy/test contract")


class Outcome(unittest.TestResult):
    """The names of passed and failed tests."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed.append(test.test_data["name"])  # type: ignore[attr-defined]

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        self.failed[test.test_data["name"]] = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]

    addError = addFailure


def run_suite(store: Store, folder: Path, source: Path) -> Outcome:
    """Run the tests of one file in their order, which they depend on."""
    (folder / source.name).symlink_to(source)
    open_policy = folder / "everybody.policy"
    open_policy.write_text("".join(f'"{rule}": "@"\n' for rule in RULES))
    policy = (
        Policy(PLACEMENT_RULES, str(open_policy))
        if "OpenPolicyFixture" in source.read_text()
        else None
    )
    application = placement_worlds.callers(app.create(store, policy))
    suite = driver.build_tests(
        str(folder),
        unittest.TestLoader(),
        intercept=lambda: application,
        test_loader_name="placement",
        fixture_module=placement_worlds.fixtures(store),
    )
    result, before = Outcome(), dict(os.environ)
    try:
        suite.run(result)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return result


def run_file(folder: Path, source: Path, url: str = "") -> Outcome:
    """Run a file on this database, or on a new SQLite database."""
    (folder / "tests").mkdir(parents=True)
    store = Store(url) if url else upgrade(Store("sqlite://"))
    try:
        return run_suite(store, folder / "tests", source)
    finally:
        store.close()


#: Files with statements that may behave differently on other databases.
ON_EVERY_DATABASE = (
    "resource-provider.yaml",
    "resource-provider-aggregates.yaml",
    "with-allocations.yaml",
    "resource-provider-resources-query.yaml",
    "allocation-candidates-member-of.yaml",
    "inventory.yaml",
    "traits.yaml",
    "resource-classes.yaml",
    "unicode.yaml",
    "consumer-types-1.38.yaml",
)


def listed_failures(name: str) -> set[str]:
    """Return the listed failures of a file."""
    return {test for group in KNOWN["failing"].values() for test in group["tests"].get(name, [])}


def test_placement_gabbi_failures_match_list_of_known_failures(
    gabbits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gabbi reads YAML with this class, and the C version is faster.
    monkeypatch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
    sources = sorted(path for path in gabbits.glob("*.yaml") if path.name not in KNOWN["not_run"])
    results = {source.name: run_file(tmp_path / source.stem, source) for source in sources}
    new_failures = [
        f"{name}: {test}: fails\n{text}"
        for name, result in results.items()
        for test, text in result.failed.items()
        if test not in listed_failures(name)
    ]
    stale_entries = [
        f"{name}: {test}: passes, or is no more; take it off placement_known.toml"
        for name, result in results.items()
        for test in sorted(listed_failures(name) - set(result.failed))
    ]
    passed = sum(len(result.passed) for result in results.values())
    total = passed + sum(len(result.failed) for result in results.values())
    with capsys.disabled():
        print(f"\nplacement's own tests: {passed} of {total} pass, in {len(sources)} files")
    assert not new_failures and not stale_entries, "\n".join([*new_failures[:5], *stale_entries])
    assert {name for group in KNOWN["failing"].values() for name in group["tests"]} <= set(results)
    assert total > 1000


@pytest.mark.slice("operations")
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_placement_gabbi_failures_on_postgresql_and_mariadb_match_list(
    gabbits: Path, tmp_path: Path, kind: str, servers: Callable[[str], Server]
) -> None:
    databases = servers(kind)
    for name in ON_EVERY_DATABASE:
        url = databases.lend()
        result = run_file(tmp_path / Path(name).stem, gabbits / name, url)
        databases.take_back(url)
        assert set(result.failed) == listed_failures(name), "\n".join(
            text for test, text in result.failed.items() if test not in listed_failures(name)
        )
