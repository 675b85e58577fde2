# SPDX-License-Identifier: Apache-2.0
"""Dependencies in setup.cfg: each is imported or has a reason, and the lock files match."""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.unit.test_house_rules import PACKAGES, ROOT, imports, name_of, sources

#: Distribution in setup.cfg that no module of the product imports -> the reason to declare it.
NOT_IMPORTED = {
    "cinder": "the volume service of ./deploy/test cinder, in a separate environment",
    "ddt": "imported by the fake driver of Cinder",
    "nova": "the schemas are read in a separate environment",
    "tempest": "a command that tests the API in a separate environment",
    "python-novaclient": "the functional suite tests the API in a separate environment",
    "oslotest": "required by the functional suite of openstacksdk",
    "Sphinx": "a command that builds the documentation in a separate environment",
    "myst-parser": "reads the pages for Sphinx, in the same environment",
    "psycopg": "SQLAlchemy loads it by the URL's name",
    "PyMySQL": "SQLAlchemy loads it by the URL's name",
    "mysqlclient": "SQLAlchemy loads it by the URL's name",
    "python-openstackclient": "a command for operators and tests",
    "osc-placement": "a plugin of the client for the placement service",
    "setuptools": "builds the editable installation without a network",
    "uv": "installs the other distributions",
    "ceilometer": "a script of the tests runs Ceilometer in a separate environment",
    "gabbi": "tests",
    "hypothesis": "tests",
    "openstacksdk": "imported as openstack",
    "opentelemetry-exporter-otlp-proto-http": "imported as opentelemetry, as the SDK is",
    "pytest": "tests",
    "pytest-timeout": "tests",
    "pytest-xdist": "tests",
    "import-linter": "lint",
    "mypy": "lint",
    "ruff": "lint",
}
#: Imported package -> its distribution, if the names differ.
DISTRIBUTIONS = {
    "libvirt": "libvirt-python",
    "re2": "google-re2",
    "argon2": "argon2-cffi",
    "yaml": "PyYAML",
    "opentelemetry": "opentelemetry-sdk",
}
#: Extra -> the folders that run with this extra only, and prefixes of files in them that do not.
EXTRAS = {
    "agent": (("common", "compute_agent"), ("common/store/",)),
    "conductor": (("common", "conductor", "scheduler"), ()),
    "api": (("common", "compute_api"), ()),
}
#: Lock file -> the extras in the file. The extra "" stands for install_requires.
CONTROL = ("", "api", "conductor", "postgresql", "mysql", "unified-limits")
EVERY = (*CONTROL, "agent", "tracing", "debian", "standalone")
LOCKS = {
    "requirements.txt": EVERY,
    "requirements-control.txt": CONTROL,
    "requirements-test.txt": (*EVERY, "test"),
    "requirements-installer.txt": ("installer",),
    "requirements-tempest.txt": ("tempest",),
    "requirements-nova-tests.txt": ("nova",),
    "requirements-ceilometer.txt": ("ceilometer",),
    "requirements-cinder.txt": ("cinder",),
    "requirements-docs.txt": ("docs",),
    "requirements-clients.txt": ("clients",),
}
#: Modules that import a distribution of another extra, if an option or URL requires it.
BY_OPTION = {
    ("common/clients/limits.py", "oslo-limit"),
    ("common/store/connections.py", "psycopg"),
    ("common/service/tracing.py", "opentelemetry-sdk"),
}


def test_declared_dependencies_equal_the_imported_packages() -> None:
    declared = declared_names("", *setup()["options.extras_require"])
    roots = {module.split(".")[0] for path in sources(*PACKAGES) for module, _ in imports(path)}
    used = {
        normalise(DISTRIBUTIONS.get(root, root))
        for root in roots - sys.stdlib_module_names - set(PACKAGES)
    }
    declared_distributions = {normalise(name) for name in declared}
    assert used - declared_distributions - {"openstack"} == set(), (
        "imported and not declared in setup.cfg"
    )
    assert declared_distributions - used - {normalise(name) for name in NOT_IMPORTED} == set(), (
        "declared in setup.cfg, imported by nobody"
    )


def test_package_extra_declares_the_imports_of_its_processes() -> None:
    undeclared = {
        (name_of(path), distribution)
        for extra, (folders, others) in EXTRAS.items()
        for declared in [{normalise(name) for name in declared_names("", extra)}]
        for path in sources(*folders)
        if not name_of(path).startswith(others or "-")
        for root in {module.split(".")[0] for module, _ in imports(path)}
        if root not in sys.stdlib_module_names and root not in PACKAGES
        for distribution in [normalise(DISTRIBUTIONS.get(root, root))]
        if distribution not in declared
    }
    assert undeclared == BY_OPTION


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_file_has_each_dependency_within_its_range(lock: str) -> None:
    text = (ROOT / "deploy" / lock).read_text()
    locked = {
        normalise(name): version for name, version in re.findall(r"^(\S+)==(\S+)", text, re.M)
    }
    out_of_range = {
        str(dependency): locked.get(normalise(dependency.name))
        for dependency in dependencies(*LOCKS[lock])
        if locked.get(normalise(dependency.name)) not in dependency.specifier
    }
    assert out_of_range == {}


def test_dependency_ranges_have_a_lower_and_an_upper_bound() -> None:
    assert [
        str(dependency)
        for dependency in dependencies("", *setup()["options.extras_require"])
        if sorted(bound.operator for bound in dependency.specifier) != ["<", ">="]
    ] == []


def test_python_requires_equals_the_classifiers() -> None:
    options = setup()
    supported = SpecifierSet(options["options"]["python_requires"])
    versions = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported]
    assert re.findall(r"Python :: (3\.\d+)", options["metadata"]["classifiers"]) == versions
    assert options["mypy"]["python_version"] == versions[0]


def setup() -> configparser.ConfigParser:
    """Read setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def dependencies(*names: str) -> Iterator[Requirement]:
    """Yield the requirements of these extras. The extra "" stands for install_requires."""
    options = setup()
    for name in names:
        lines = (
            options["options.extras_require"][name]
            if name
            else options["options"]["install_requires"]
        )
        for line in lines.split():
            if line.startswith("kilonova["):
                yield from dependencies(*Requirement(line).extras)
            else:
                yield Requirement(line)


def declared_names(*names: str) -> set[str]:
    """Return the names of the distributions of these extras."""
    return {dependency.name for dependency in dependencies(*names)}


def normalise(name: str) -> str:
    """Return the normalised name, which is the same for Foo.bar, foo-bar and foo_bar."""
    return name.lower().replace("_", "-").replace(".", "-")
