# SPDX-License-Identifier: Apache-2.0
"""setup.cfg declares each dependency that the product imports, and no others."""

from __future__ import annotations

import configparser
import sys

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
#: Imported where an option or a URL asks for it: what has an extra of its own.
BY_OPTION = {
    ("common/clients/limits.py", "oslo-limit"),
    ("common/store/connections.py", "psycopg"),
    ("common/tracing.py", "opentelemetry-sdk"),
}


def test_dependencies_are_what_is_imported() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = declared_by("", *setup["options.extras_require"])
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


def declared_by(*names: str) -> set[str]:
    """Distributions of these extras; "": what all processes need."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found: set[str] = set()
    for name in names:
        text = (
            setup["options.extras_require"][name] if name else setup["options"]["install_requires"]
        )
        for line in text.split():
            if line.startswith("kilonova["):
                found |= declared_by(line.removeprefix("kilonova[").rstrip("]"))
            elif "==" in line:
                found.add(line.split("==")[0].split("[")[0])
    return found


def plain(name: str) -> str:
    """The same for Foo.bar, foo-bar and foo_bar."""
    return name.lower().replace("_", "-").replace(".", "-")
