# SPDX-License-Identifier: Apache-2.0
"""The jobs of ./deploy/test, their budgets, and the sets of tests.

The module contains this table and its look-ups. ``./deploy/test`` reads this table before anything
is installed, and tests/selection.py reads it in each pytest process. A test belongs to the first
job of its ring with a matching fixture or mark. A job therefore makes only the servers, hosts and
clouds of the tests. A test is in the default set unless a mark puts it into a slice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class Set(StrEnum):
    """A set of tests with a budget: the default one, and every test."""

    DEFAULT = "default"
    ALL = "all"


class Slice(StrEnum):
    """A part of the tests, chosen with ``@pytest.mark.slice(...)``.

    Only the set ``all`` contains every slice.
    """

    DEFAULT = "default"
    GUESTS = "guests"
    MOVES = "moves"
    OPERATIONS = "operations"


SLICES = tuple(part for part in Slice if part is not Slice.DEFAULT)
#: The slice that contains some of Tempest's tests.
TEMPEST_SLICE = Slice.GUESTS
#: The slice that lets Ceilometer discover guests.
CEILOMETER_SLICE = Slice.GUESTS
#: Minutes on two idle CPUs, after the installation.
LIMITS_MINUTES = {Set.DEFAULT: 10, Set.ALL: 30}
#: With CI=true a run fails when a set uses more than this multiple of the CPU budget.
TOLERANCE = 1.3


@dataclass(frozen=True)
class Budget:
    """The CPU-seconds that a job may use on the reference machine (deploy/testing/speed.py)."""

    default: int = 0
    all: int = 0

    def of(self, chosen: Set) -> int:
        """Return the CPU-seconds that the job may use in this set on the reference machine."""
        return self.default if chosen is Set.DEFAULT else self.all


@dataclass(frozen=True)
class Job:
    """One process of pytest, or of ``module``.

    Attributes:
        ring: The ring, a folder below tests/.
        name: The job's name, unique.
        fixtures: The job has the tests that use any of these fixtures.
        mark: The job has the tests with this mark. Without fixtures and mark: the rest of the ring.
        files: Patterns of the names of all files with such tests. The job imports no other file.
        servers: Private servers of the job (deploy/testing/servers.py).
        module: Run this module instead of pytest.
        seconds: Duration in a run of ``all``. Longer jobs start first.
        budget: CPU time in each set.
    """

    ring: str
    name: str
    fixtures: frozenset[str] = frozenset()
    mark: str = ""
    files: tuple[str, ...] = ("*",)
    servers: tuple[str, ...] = ()
    module: str = ""
    seconds: int = 0
    budget: Budget = Budget()

    def has(self, fixtures: Collection[str], marks: Collection[str]) -> bool:
        """Return True if a test of the ring with these fixtures and marks matches this job.

        If the job has fixtures, the test must use any of them. If the job has a mark, the test must
        have this mark. The test belongs to the first matching job (``job_of``).

        Args:
            fixtures: Names of the fixtures that the test uses.
            marks: Names of the test's marks.
        """
        return (not self.fixtures or not self.fixtures.isdisjoint(fixtures)) and (
            not self.mark or self.mark in marks
        )

    def reads(self, file: str) -> bool:
        """Return True if the file's name matches ``files``, so that the job imports the file."""
        return any(fnmatchcase(file, pattern) for pattern in self.files)


#: CPU time of the private database and message servers.
SERVERS = Budget(130, 130)
SQL = ("postgresql", "mariadb")
#: A test belongs to the first matching job.
JOBS = (
    Job("e2e", "e2e-debian", frozenset({"debians"}), seconds=1000, budget=Budget(0, 65)),
    Job("e2e", "e2e-cloud", frozenset({"first_up"}), seconds=1500, budget=Budget(22, 85)),
    Job("e2e", "e2e-lab", frozenset({"lab_up"}), seconds=900, budget=Budget(35, 140)),
    Job("e2e", "e2e-shared-lab", frozenset({"shared_lab_up"}), seconds=290, budget=Budget(0, 40)),
    Job("e2e", "e2e-memory", seconds=1100, budget=Budget(60, 430)),
    Job(
        "contract",
        "contract-moves",
        frozenset({"machines", "pair", "sharing", "live"}),
        "kvm_or_tcg",
        files=("test_virt_*",),
        seconds=660,
        budget=Budget(0, 240),
    ),
    # One process, so that the ring is imported and each kind of cloud is prepared once.
    Job("workflows", "workflows", seconds=900, budget=Budget(240, 390)),
    Job(
        "contract",
        "contract-guests",
        mark="kvm_or_tcg",
        files=("test_virt_*", "test_tiny_image.py"),
        seconds=950,
        budget=Budget(40, 330),
    ),
    Job(
        "contract",
        "contract-databases",
        frozenset({"servers"}),
        servers=("rabbitmq", *SQL),
        seconds=400,
        budget=Budget(125, 130),
    ),
    Job(
        "functional", "functional", servers=("rabbitmq", *SQL), seconds=700, budget=Budget(50, 210)
    ),
    Job(
        "contract",
        "contract-networks",
        frozenset({"network_hosts"}),
        files=("test_network_host*",),
        seconds=110,
        budget=Budget(32, 32),
    ),
    Job(
        "contract", "contract-services", servers=("rabbitmq",), seconds=640, budget=Budget(175, 190)
    ),
    Job("api", "api", seconds=350, budget=Budget(130, 130)),
    # One process, so that the ring is imported once.
    Job("unit", "unit", seconds=430, budget=Budget(115, 135)),
    Job("lint", "lint", module="deploy.testing.lint", seconds=80, budget=Budget(50, 50)),
)
TEMPEST = Job("tempest", "tempest", module="tests.tempest")
CLIENTS = Job("clients", "clients", module="tests.clients")
INSTALL = Job("install", "install")
CINDER = Job("cinder", "cinder", servers=("rabbitmq", "mariadb"))
FAULTS = Job("faults", "faults", module="tests.fault_matrix")
NEWCOMER = Job("newcomer", "newcomer", module="tests.newcomer")
UPGRADE = Job("upgrade", "upgrade")
#: Jobs that run only by name.
ALONE = (
    Job("bench", "bench", module="tests.bench"),
    Job("fuzz", "fuzz", module="tests.fuzz"),
    Job("mutations", "mutations", servers=("rabbitmq",), module="tests.mutations"),
    TEMPEST,
    CLIENTS,
    INSTALL,
    CINDER,
    FAULTS,
    NEWCOMER,
    UPGRADE,
)
RINGS = (
    "lint",
    "unit",
    "contract",
    "workflows",
    "functional",
    "api",
    "e2e",
    "bench",
    "fuzz",
    "mutations",
    "tempest",
    "clients",
    "install",
    "cinder",
    "faults",
    "newcomer",
    "upgrade",
)


def job_of(ring: str, fixtures: Collection[str], marks: Collection[str]) -> Job:
    """Return the job of a test: the first job of this ring that matches, as in ``Job.has``.

    Raises:
        StopIteration: No job of the ring matches.
    """
    return next(job for job in (*JOBS, *ALONE) if job.ring == ring and job.has(fixtures, marks))


def longest_first(jobs: Collection[Job]) -> list[Job]:
    """Return the jobs in the order of their start: by ``seconds``, the longest first."""
    return sorted(jobs, key=lambda job: -job.seconds)
