# SPDX-License-Identifier: Apache-2.0
"""The summary of a run of ./deploy/test.

It has CPU time beside the budgets, the longest tests, and the reasons of skipped tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from deploy.testing.jobs import Result
from deploy.testing.plan import SERVERS, Set

LONGEST = 15  # how many of the longest tests are listed


def budget_lines(
    results: Sequence[Result], servers_cpu: float, chosen: Set | None, speed: float
) -> Iterator[str]:
    """Yield the lines of a table: number of tests, minutes, CPU-minutes and CPU budget per job.

    The last line has the CPU-minutes and budget of the servers.

    Args:
        results: The jobs that ran.
        servers_cpu: CPU-seconds of the private database and message servers.
        chosen: The set whose budgets apply, or None for a slice, which has no budget.
        speed: Factor by which the budgets are multiplied, from ``deploy.testing.speed``.
    """
    yield f"{'job':<22}{'tests':>7}{'minutes':>9}{'CPU minutes':>13}{'budget':>8}"
    for result in sorted(results, key=lambda result: -result.cpu_seconds):
        budget = _minutes(result.job.budget.of(chosen), speed) if chosen else ""
        yield (
            f"{result.job.name:<22}{len(result.cases):>7}{result.seconds / 60:>9.1f}"
            f"{result.cpu_seconds / 60:>13.1f}{budget:>8}"
        )
    budget = _minutes(SERVERS.of(chosen), speed) if chosen else ""
    yield f"{'servers':<22}{'':>7}{'':>9}{servers_cpu / 60:>13.1f}{budget:>8}"


def _minutes(seconds: float, speed: float) -> str:
    return f"{seconds * speed / 60:.1f}"


def longest_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each of the ``LONGEST`` longest tests, the longest first."""
    cases = sorted(
        (case for result in results for case in result.cases), key=lambda case: -case.seconds
    )
    for case in cases[:LONGEST]:
        yield f"{case.seconds:8.1f} s  {case.id}"


def skip_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line per reason with its number of skipped tests, the most frequent reason first."""
    reasons = Counter(case.skipped for result in results for case in result.skipped_cases)
    for reason, count in reasons.most_common():
        yield f"{count:8} skipped: {reason}"


def skipped_tests(results: Sequence[Result]) -> Iterator[str]:
    """Yield one line for each skipped test: the id, a tab, and the reason."""
    for result in results:
        for case in result.skipped_cases:
            yield f"{case.id}\t{case.skipped}\n"
