# SPDX-License-Identifier: Apache-2.0
"""The placement service's own tests (gabbi files of the package openstack-placement) against ours.

They are data: nothing of that package runs. Our application answers in this process, over a
database a file of tests.
``placement_known.toml`` lists which of them do not pass, and why; whatever else fails, and whatever
is listed there and passes, fails here. How many pass is printed.
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


class Names(unittest.TestResult):
    """Which tests did what."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed.append(test.test_data["name"])  # type: ignore[attr-defined]

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        self.failed[test.test_data["name"]] = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]

    addError = addFailure


def outcome(store: Store, folder: Path, source: Path) -> Names:
    """Run the tests of one file, in their order, as one story."""
    (folder / source.name).symlink_to(source)
    everybody = folder / "everybody.policy"
    everybody.write_text("".join(f'"{rule}": "@"\n' for rule in RULES))
    policy = (
        Policy(PLACEMENT_RULES, str(everybody))
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
    result, before = Names(), dict(os.environ)
    try:
        suite.run(result)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return result


def run(folder: Path, source: Path, url: str = "") -> Names:
    """Run a file over this database, or over one of its own."""
    (folder / "tests").mkdir(parents=True)
    store = Store(url) if url else upgrade(Store("sqlite://"))
    try:
        return outcome(store, folder / "tests", source)
    finally:
        store.close()


#: With what statements could do otherwise elsewhere.
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


def expected(name: str) -> set[str]:
    """The tests of a file that do not pass, as the list has them."""
    return {test for group in KNOWN["failing"].values() for test in group["tests"].get(name, [])}


def test_what_passes_is_what_we_say(
    gabbits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gabbi reads its files with this class, and the one in C is faster.
    monkeypatch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)
    sources = sorted(path for path in gabbits.glob("*.yaml") if path.name not in KNOWN["not_run"])
    results = {source.name: run(tmp_path / source.stem, source) for source in sources}
    news = [
        f"{name}: {test}: fails\n{text}"
        for name, result in results.items()
        for test, text in result.failed.items()
        if test not in expected(name)
    ]
    gone = [
        f"{name}: {test}: passes, or is no more; take it off placement_known.toml"
        for name, result in results.items()
        for test in sorted(expected(name) - set(result.failed))
    ]
    passed = sum(len(result.passed) for result in results.values())
    total = passed + sum(len(result.failed) for result in results.values())
    with capsys.disabled():
        print(f"\nplacement's own tests: {passed} of {total} pass, in {len(sources)} files")
    assert not news and not gone, "\n".join([*news[:5], *gone])
    assert {name for group in KNOWN["failing"].values() for name in group["tests"]} <= set(results)
    assert total > 1000


@pytest.mark.slice("operations")
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_other_databases_do_as_well(
    gabbits: Path, tmp_path: Path, kind: str, servers: Callable[[str], Server]
) -> None:
    databases = servers(kind)
    for name in ON_EVERY_DATABASE:
        url = databases.lend()
        result = run(tmp_path / Path(name).stem, gabbits / name, url)
        databases.take_back(url)
        assert set(result.failed) == expected(name), "\n".join(
            text for test, text in result.failed.items() if test not in expected(name)
        )
