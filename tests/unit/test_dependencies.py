# SPDX-License-Identifier: Apache-2.0
"""Dependencies: each is declared in setup.cfg, used, locked within its range, and has its reason in
docs/decisions/0002."""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.unit.test_house_rules import PACKAGES, ROOT, imports, name_of, sources

#: Declared in setup.cfg and imported by nobody here, and why it is needed all the same.
NOT_IMPORTED = {
    "cinder": "the neighbour of ./deploy/test cinder, in an environment of its own",
    "ddt": "what its fake driver imports beside it",
    "nova": "its schemas are read in an environment of its own",
    "tempest": "judges the API in an environment of its own: a command",
    "python-novaclient": "judges the API in an environment of its own: its functional suite",
    "oslotest": "what openstacksdk's functional suite needs beside openstacksdk",
    "Sphinx": "makes the site of the documentation in an environment of its own: a command",
    "myst-parser": "reads the pages for Sphinx, in the same environment",
    "psycopg": "SQLAlchemy loads it by the URL's name",
    "PyMySQL": "SQLAlchemy loads it by the URL's name",
    "mysqlclient": "SQLAlchemy loads it by the URL's name",
    "python-openstackclient": "the operator's and the tests' client: a command",
    "osc-placement": "adds the placement service to the client, which finds it by itself",
    "setuptools": "builds the editable installation without a network",
    "uv": "installs the others",
    "ceilometer": "a script of the tests runs it in an environment of its own",
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
#: The name of a distribution where it differs from the package that is imported.
DISTRIBUTIONS = {
    "libvirt": "libvirt-python",
    "re2": "google-re2",
    "argon2": "argon2-cffi",
    "yaml": "PyYAML",
    "opentelemetry": "opentelemetry-sdk",
}
#: An extra of setup.cfg -> what runs with nothing but that, and what does not belong to it there.
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
#: Imported where an option or a URL asks for it: what has an extra of its own.
BY_OPTION = {
    ("common/clients/limits.py", "oslo-limit"),
    ("common/store/connections.py", "psycopg"),
    ("common/service/tracing.py", "opentelemetry-sdk"),
}


def test_dependencies_are_what_is_imported() -> None:
    declared = declared_by("", *setup()["options.extras_require"])
    roots = {module.split(".")[0] for path in sources(*PACKAGES) for module, _ in imports(path)}
    used = {
        plain(DISTRIBUTIONS.get(root, root))
        for root in roots - sys.stdlib_module_names - set(PACKAGES)
    }
    known = {plain(name) for name in declared}
    assert used - known - {"openstack"} == set(), "imported and not declared in setup.cfg"
    assert known - used - {plain(name) for name in NOT_IMPORTED} == set(), (
        "declared in setup.cfg, imported by nobody"
    )


def test_extras_declare_what_their_processes_import() -> None:
    undeclared = {
        (name_of(path), distribution)
        for extra, (folders, others) in EXTRAS.items()
        for declared in [{plain(name) for name in declared_by("", extra)}]
        for path in sources(*folders)
        if not name_of(path).startswith(others or "-")
        for root in {module.split(".")[0] for module, _ in imports(path)}
        if root not in sys.stdlib_module_names and root not in PACKAGES
        for distribution in [plain(DISTRIBUTIONS.get(root, root))]
        if distribution not in declared
    }
    assert undeclared == BY_OPTION


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_every_dependency_within_its_range(lock: str) -> None:
    text = (ROOT / "deploy" / lock).read_text()
    locked = {plain(name): version for name, version in re.findall(r"^(\S+)==(\S+)", text, re.M)}
    out_of_range = {
        str(dependency): locked.get(plain(dependency.name))
        for dependency in dependencies(*LOCKS[lock])
        if locked.get(plain(dependency.name)) not in dependency.specifier
    }
    assert out_of_range == {}


def test_ranges_have_a_lower_and_an_upper_bound() -> None:
    assert [
        str(dependency)
        for dependency in dependencies("", *setup()["options.extras_require"])
        if sorted(bound.operator for bound in dependency.specifier) != ["<", ">="]
    ] == []


def test_python_versions_are_those_of_the_classifiers() -> None:
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


def declared_by(*names: str) -> set[str]:
    """Return the names of the distributions of these extras."""
    return {dependency.name for dependency in dependencies(*names)}


def plain(name: str) -> str:
    """The same for Foo.bar, foo-bar and foo_bar."""
    return name.lower().replace("_", "-").replace(".", "-")
