# SPDX-License-Identifier: Apache-2.0
"""The speed of this machine, by which the CPU budgets of ./deploy/test are scaled.

./deploy/test measures before and after the tests, and the slower measurement counts. A fixed
calculation runs in one process per CPU at the same time, because the tests load all CPUs too. The
CPU time, divided by that of the reference machine, scales every budget.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import time

from deploy.packages import ROOT

#: CPU-seconds of ``calculate`` on the machine on which the budgets were measured.
REFERENCE_SECONDS = 0.45
ROUNDS = 3
_RECORDS = [{"id": str(number), "tags": ["a", "b"], "size": number} for number in range(500)]


def measure() -> float:
    """Return the CPU time of ``calculate``, divided by that of the reference machine.

    A result above 1 means that this machine is slower. One process per CPU runs at the same time.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(os.cpu_count() or 1)
    ]
    seconds = [float(process.communicate()[0]) for process in processes]
    return statistics.mean(seconds) / REFERENCE_SECONDS


def calculate() -> None:
    """Do a fixed amount of work of the kinds that the tests do most: objects, text and hashes."""
    for _ in range(400):
        text = json.dumps(_RECORDS)
        records = sorted(json.loads(text), key=lambda record: record["id"])
        sizes = {record["id"]: record["size"] for record in records}
        hashlib.sha256(f"{text}{sum(sizes.values())}".encode()).hexdigest()


def _print_seconds() -> None:
    durations = []
    for _ in range(ROUNDS):
        began = time.process_time()
        calculate()
        durations.append(time.process_time() - began)
    print(statistics.mean(durations))


if __name__ == "__main__":
    _print_seconds()
