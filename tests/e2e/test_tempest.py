# SPDX-License-Identifier: Apache-2.0
"""The tests of Tempest that need no server, against a cloud in memory; ``./deploy/test tempest``
runs the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy import environment
from deploy.testing.plan import TEMPEST_SLICE
from tests.e2e.guests import clear
from tests.e2e.live import Live
from tests.tempest import configure
from tests.tempest.__main__ import LEAST, Tempest
from tests.tempest.groups import read_lists, sorted_into

GROUP = "A1"
#: These boot servers all the same, or look for networks that the cloud of these tests does not
#: have.
LEFT_OUT = re.compile(
    r"test_migrations|compute\.images\.|with_az|quota_is_full|admin\.test_networks"
)


@pytest.mark.slice(TEMPEST_SLICE)
def test_what_needs_no_server_passes_tempest(keeping: Live, tmp_path: Path) -> None:
    if not environment.has_tempest():
        pytest.skip(f"Tempest is not installed: ./deploy/test {TEMPEST_SLICE} installs it")
    clear(keeping.rest())  # a host with a server does not join another zone
    tempest = Tempest(tmp_path / "tempest")
    configure.write(configure.Cloud.of(keeping.seed, "empty"), tempest.folder, LEAST)
    ids = sorted_into(tempest.ids(), read_lists())[GROUP]
    outcome = tempest.run([one for one in ids if not LEFT_OUT.search(one)], GROUP)
    assert outcome.is_well, outcome.line() + "".join(
        f"\n{one}: {outcome.said.get(one, 'not run')}"
        for one in (*outcome.failed, *outcome.not_run)
    )
    assert len(outcome.passed) > 9 * len(outcome.skipped), outcome.reasons()
    keeping.judge()
