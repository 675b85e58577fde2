# SPDX-License-Identifier: Apache-2.0
"""The tests of Tempest that need no server, against a cloud with memory hypervisors.

``./deploy/test tempest`` runs the other tests.
"""

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
from tests.tempest.groups import read_lists, sort_into_groups

GROUP = "A1"
#: Tests of the group that boot servers or need networks, which this cloud does not have.
LEFT_OUT = re.compile(
    r"test_migrations|compute\.images\.|with_az|quota_is_full|admin\.test_networks"
)


@pytest.mark.slice(TEMPEST_SLICE)
def test_tempest_tests_without_server_pass(keeping: Live, tmp_path: Path) -> None:
    if not environment.has_tempest():
        pytest.skip(f"Tempest is not installed: ./deploy/test {TEMPEST_SLICE} installs it")
    # A host with a server cannot join another zone.
    clear(keeping.rest())
    tempest = Tempest(tmp_path / "tempest")
    configure.write(configure.Cloud.of(keeping.seed, "empty"), tempest.folder, LEAST)
    ids = sort_into_groups(tempest.list_tests(), read_lists())[GROUP]
    outcome = tempest.run([test_id for test_id in ids if not LEFT_OUT.search(test_id)], GROUP)
    assert outcome.is_ok, outcome.line() + "".join(
        f"\n{test_id}: {outcome.errors.get(test_id, 'not run')}"
        for test_id in (*outcome.failed, *outcome.not_run)
    )
    assert len(outcome.passed) > 9 * len(outcome.skipped), outcome.reasons()
    keeping.assert_healthy()
