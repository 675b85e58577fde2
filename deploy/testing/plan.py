# SPDX-License-Identifier: Apache-2.0
"""What runs in which process, and in which set: the one table of the tests' jobs, and the sets that
tests are in.

Pure data: ``./deploy/test`` reads it before anything is installed, and tests/selection.py in each
pytest process. A test belongs to the first job of its ring whose fixtures or mark it has, so each
job makes only the servers, hosts and clouds that its tests share. A test is in the default set
unless a mark puts it into a slice.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Slice(StrEnum):
    """The sets that a test can be in. All but DEFAULT are what ``ci`` draws one from;
    ``@pytest.mark.slice(...)``."""

    DEFAULT = "default"
    GUESTS = "guests"
    MOVES = "moves"
    OPERATIONS = "operations"


SLICES = tuple(one for one in Slice if one is not Slice.DEFAULT)
#: Where some of Tempest's tests are.
TEMPEST_SLICE = Slice.GUESTS
#: Every slice; the default set and the one that the commit draws.
ALL, CI = "all", "ci"
#: Minutes on two processors, after the installation.
LIMITS_MINUTES = {str(Slice.DEFAULT): 12, CI: 25, ALL: 35}


@dataclass(frozen=True)
class Job:
    """One process of pytest (or of ``module``).

    ``fixtures`` and ``mark``: which of the ring's tests it has; with neither, the rest. ``part``:
    (k, n), the k-th of n parts of these tests, the cases of one test in one part. ``servers``: what
    it uses of deploy/servers.py.
    ``seconds``: what it took in a run of ``all``.
    """

    ring: str
    name: str
    fixtures: frozenset[str] = frozenset()
    mark: str = ""
    part: tuple[int, int] = (1, 1)
    servers: tuple[str, ...] = ()
    module: str = ""
    seconds: int = 0

    def has(self, fixtures: Collection[str], marks: Collection[str], test: str) -> bool:
        """Does a test that uses these belong here? ``test``: its id, without the case's."""
        return (
            (not self.fixtures or not self.fixtures.isdisjoint(fixtures))
            and (not self.mark or self.mark in marks)
            and zlib.crc32(test.encode()) % self.part[1] + 1 == self.part[0]
        )


SQL = ("postgresql", "mariadb")
#: A test belongs to the first that has it.
JOBS = (
    Job("e2e", "e2e-debian", frozenset({"debians"}), seconds=380),
    Job("e2e", "e2e-cloud", frozenset({"first_up"}), seconds=1040),
    Job("e2e", "e2e-lab", frozenset({"lab_up"}), seconds=1390),
    Job("e2e", "e2e-shared-lab", frozenset({"shared_lab_up"}), seconds=290),
    Job("e2e", "e2e-memory", seconds=960),
    Job(
        "contract",
        "contract-moves",
        frozenset({"machines", "pair", "sharing", "live"}),
        "kvm_or_tcg",
        seconds=660,
    ),
    Job("workflows", "workflows-1", part=(1, 2), seconds=130),
    Job("workflows", "workflows-2", part=(2, 2), seconds=420),
    Job("contract", "contract-guests", mark="kvm_or_tcg", seconds=710),
    Job(
        "contract",
        "contract-databases",
        frozenset({"servers"}),
        servers=("rabbitmq", *SQL),
        seconds=240,
    ),
    Job("functional", "functional", servers=("rabbitmq", *SQL), seconds=300),
    Job("contract", "contract-networks", frozenset({"network_hosts"}), seconds=50),
    Job("contract", "contract-services", servers=("rabbitmq",), seconds=360),
    Job("api", "api", seconds=130),
    Job("unit", "unit-1", part=(1, 2), seconds=90),
    Job("unit", "unit-2", part=(2, 2), seconds=130),
    Job("lint", "lint", module="deploy.lint", seconds=20),
)
TEMPEST = Job("tempest", "tempest", module="tests.tempest")
CLIENTS = Job("clients", "clients", module="tests.clients")
INSTALL = Job("install", "install")
CINDER = Job("cinder", "cinder", servers=("rabbitmq", "mariadb"))
FAULTS = Job("faults", "faults", module="tests.fault_matrix")
NEWCOMER = Job("newcomer", "newcomer", module="tests.newcomer")
#: Run only when they are named, and start servers of their own.
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
)


def job_of(ring: str, fixtures: Collection[str], marks: Collection[str], test: str) -> Job:
    """The job that a test of this ring belongs to."""
    every = (*JOBS, *ALONE)
    return next(job for job in every if job.ring == ring and job.has(fixtures, marks, test))


def longest_first(jobs: Collection[Job]) -> list[Job]:
    """The order in which jobs are started: a long one that began late would be waited for alone."""
    return sorted(jobs, key=lambda job: -job.seconds)


def slice_of_commit(commit: str) -> Slice:
    """The slice that ``ci`` adds to the default set for this commit, by its hash."""
    return SLICES[int(commit, 16) % len(SLICES)]
