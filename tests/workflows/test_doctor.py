# SPDX-License-Identifier: Apache-2.0
"""Tests of ``kilonova doctor`` and ``--fix`` with a fault of each kind in the simulated cloud.

A test plants a fault, and the doctor finds it with its cause. After the fix, conductors, hosts and
external services do the rest, and the doctor finds no fault.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from common.domain import errors, states
from common.store import cleanups, schema
from common.store.engine import Connection
from common.store.servers import actions
from common.store.views import gauges, host_files
from compute_agent.queries import HostQueries
from deploy.operator import cleanups as cli_cleanups
from deploy.operator import doctor
from deploy.operator.doctor import Finding, remedies
from deploy.operator.doctor import fix as doctor_fix
from deploy.operator.doctor.fix import GuestCommands
from deploy.operator.doctor.kinds import KINDS, Mender
from deploy.operator.hosts import discard as host_discard
from tests.workflows.planted import (
    NOBODY,
    PLANTS,
    attached,
    change,
    elsewhere,
    here,
    plant_kind,
    server,
    share,
    stray_files,
    without_domain,
)
from tests.workflows.planted_for_operators import FOR_OPERATORS
from tests.workflows.scenarios import trial_of
from tests.workflows.simulator import Cloud
from tests.workflows.test_adopt import Adopter, HostAnswers, boot_lost_server

PAGE = Path(__file__).resolve().parents[2] / "docs/reliability.md"


class Doctor:
    """An operator with ``kilonova doctor`` at this cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.adopter = cloud, Adopter(cloud)

    def look(self, tx: Connection) -> list[Finding]:
        """Return the findings that the command has for this transaction."""
        domains = {
            host.name: HostQueries(host.driver, None).answer("domains", {})["domains"]
            for host in self.cloud.hosts.values()
        }
        disks = {
            host.name: HostQueries(host.driver, None).answer("guests_volumes", {})["volumes"]
            for host in self.cloud.hosts.values()
        }
        files = {
            host.name: HostQueries(host.driver, None).answer("files", {})["servers"]
            for host in self.cloud.hosts.values()
        }
        return [
            *doctor.check(tx),
            *doctor.compare(domains, tx),
            *doctor.compare_files(files, tx),
            *doctor.compare_rules(self.cloud.shares.told(), tx),
            *doctor.compare_guests(disks, tx),
            *doctor.compare_ports(list(self.cloud.networks.held.values()), tx),
            *doctor.compare_volumes(self.cloud.volumes.told(), tx),
            *doctor.compare_images(list(self.cloud.images.records.values()), tx),
            *doctor.compare_catalogue(["network"] if self.cloud.networks.missing else [], tx),
        ]

    def read_findings(self) -> list[Finding]:
        return self.cloud.store.read(self.look)

    def fix(self, *names: str) -> int:
        cloud, ports = self.cloud, self.adopter.sources.ports
        return doctor_fix.fix(
            cloud.store,
            names,
            self.read_findings(),
            self.look,
            GuestCommands(
                lambda host, server: self.adopter.adopt(server, host),
                lambda host, server: host_discard.carry_out(
                    cloud.store, HostAnswers(cloud), ports, server, host, True
                ),
            ),
        )


def until_clean(cloud: Cloud, operator: Doctor) -> None:
    """Run rounds until no pending cleanup and no finding is left."""
    for _ in range(75):
        if not cloud.pending() and not operator.read_findings():
            break
        cloud.round()
    cloud.clean_up()


@pytest.mark.parametrize("kind", PLANTS)
def test_doctor_finds_planted_kind_and_fix_removes_finding(
    cloud: Cloud, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    plant_kind(cloud, kind)
    findings = operator.read_findings()
    assert {one.kind for one in findings} == {kind, *PLANTS[kind].also}, findings
    [one] = [one for one in findings if one.kind == kind]
    assert len({one.id for one in findings}) == len(findings)
    assert operator.fix(one.id) == 0
    assert KINDS[kind].remedy in capsys.readouterr().out
    until_clean(cloud, operator)
    assert operator.read_findings() == []
    assert operator.fix(one.id) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert operator.read_findings() == []


@pytest.mark.parametrize("kind", FOR_OPERATORS)
def test_doctor_finds_kind_for_operator_and_fix_leaves_finding(
    cloud: Cloud, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    plant_kind(cloud, kind, FOR_OPERATORS)
    findings = operator.read_findings()
    assert {one.kind for one in findings} == {kind}, findings
    assert operator.fix(findings[0].id) == 1
    assert KINDS[kind].remedy in capsys.readouterr().out
    with pytest.raises(errors.Conflict):
        cloud.store.write(lambda tx: remedies.mend(tx, findings[0], operator.look))
    assert operator.read_findings() == findings


def test_doctor_kinds_are_planted_and_counted_in_reliability_page() -> None:
    """The page has the figures and, for each kind without a fix, the reason."""
    assert PLANTS.keys() == {
        name for name, kind in KINDS.items() if kind.way is not Mender.OPERATOR
    }
    assert PLANTS.keys() | FOR_OPERATORS.keys() == KINDS.keys()
    figure = (
        f"**{len(KINDS)} of {len(KINDS)} planted kinds found, {len(PLANTS)} of {len(PLANTS)} mended by `--fix`**, "
        f"{len(FOR_OPERATORS)} for an operator"
    )
    page = PAGE.read_text()
    assert figure in " ".join(page.replace(">", "").split())
    for kind, one in FOR_OPERATORS.items():
        assert f"| `{kind}` | {one.why} |" in page
    mended_by_rows = {name for name, kind in KINDS.items() if kind.way is not Mender.GUEST}
    assert remedies.REMEDIES.keys() == PLANTS.keys() & mended_by_rows
    assert len(PLANTS) >= 30


def test_doctor_fix_keeps_server_when_finding_is_gone(cloud: Cloud) -> None:
    """Another writer has corrected the row before the fix."""
    operator = Doctor(cloud)
    name = plant_kind(cloud, "task-state")
    [finding] = operator.read_findings()
    server(task_state=None, vm_state=states.STOPPED)(cloud, name)
    before = cloud.show(name)
    assert cloud.store.write(lambda tx: remedies.mend(tx, finding, operator.look)) is False
    assert cloud.show(name) == before


def test_doctor_fix_keeps_ports_until_guest_without_record_is_adopted(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    plant_kind(cloud, "domain-known")
    findings = {one.kind: one for one in operator.read_findings()}
    assert operator.fix(findings["port-of-nobody"].id) == 1
    assert f"--fix {findings['domain-known'].id}" in capsys.readouterr().out
    assert cloud.pending() == []
    assert operator.fix(findings["domain-known"].id, findings["port-of-nobody"].id) == 0
    until_clean(cloud, operator)
    assert (operator.read_findings(), len(cloud.networks.held)) == ([], 1)


def test_host_report_of_guest_without_record_is_logged_and_found(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor uses the report when the host cannot be queried, and a fix ends the report."""
    name, no_hosts = boot_lost_server(cloud), set[str]()
    cloud.idle(65)
    assert [
        one.message for one in caplog.records if name in one.message and "doctor" in one.message
    ]
    [finding] = cloud.store.read(lambda tx: doctor.compare_reported(no_hosts, tx))
    assert (finding.kind, finding.subject, finding.facts) == ("domain-known", name, ("h1",))
    assert cloud.store.read(lambda tx: doctor.compare_reported({"h1"}, tx)) == []
    gauge = ("guests_without_record", (), 1)
    assert gauge in cloud.store.read(lambda tx: list(gauges.read(tx)))
    assert Doctor(cloud).fix(finding.id) == 0
    assert cloud.store.read(lambda tx: doctor.compare_reported(no_hosts, tx)) == []
    cloud.hosts["h1"].restart()
    cloud.settle()
    rows = cloud.store.read(lambda tx: tx.execute(sa.select(schema.hosts.c.unclaimed)).all())
    assert [row.unclaimed for row in rows] == [None, None]


def test_host_report_of_stray_files_is_logged_once_and_found(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor uses the report when the host cannot be queried, and a fix deletes the files."""
    name = plant_kind(cloud, "files-elsewhere")
    other = elsewhere(cloud, name)
    cloud.idle(65)
    records = [one for one in caplog.records if "has files of 1 servers" in one.message]
    assert [name in one.message for one in records] == [True]
    [finding] = cloud.store.read(lambda tx: doctor.compare_files({}, tx))
    assert (finding.kind, finding.subject, finding.facts) == ("files-elsewhere", name, (other,))
    assert cloud.store.read(lambda tx: doctor.compare_files({other: []}, tx)) == []
    assert Doctor(cloud).fix(finding.id) == 0
    assert cloud.store.read(lambda tx: doctor.compare_files({}, tx)) == []
    cloud.idle(65)
    assert (cloud.hosts[other].driver.host.files, cloud.findings()) == ({}, [])
    rows = cloud.store.read(lambda tx: tx.execute(sa.select(schema.hosts.c.unclaimed)).all())
    assert [row.unclaimed for row in rows] == [None, None]


def test_host_report_pages_keep_only_files_without_server(cloud: Cloud) -> None:
    """A page replaces the files of its range. A report without a range replaces all files."""
    name = trial_of(cloud, "stop").server
    host, first, second = here(cloud, name), NOBODY, "f" * 8 + NOBODY[8:]

    def note(files: list[str], *between: str) -> list[str]:
        cloud.store.write(lambda tx: host_files.note(tx, host, files, between or None))
        return [server for server, _ in cloud.store.read(host_files.list_reported)]

    assert note([first, name], "", "d") == [first]
    assert note([second], "d", "") == [first, second]
    assert note([], "", "d") == [second]
    assert note([], "d", "") == []
    assert note([name]) == [name]


def test_doctor_fix_keeps_stray_files_while_guest_is_missing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stray files may be the only copy. They are spare after the server is deleted."""
    name, operator = plant_kind(cloud, "files-elsewhere"), Doctor(cloud)
    without_domain(cloud, name)
    missing, stray = operator.read_findings()
    assert (missing.kind, stray.kind) == ("guest-there", "files-elsewhere")
    assert operator.fix(stray.id) == 1
    assert f"--fix {missing.id}" in capsys.readouterr().out
    server(deleted=1)(cloud, name)
    spare = {one.kind: one for one in operator.read_findings()}["files-elsewhere"]
    assert "was deleted" in spare.text


def test_discard_deletes_files_of_unknown_server_that_fix_keeps(cloud: Cloud) -> None:
    name, operator = plant_kind(cloud, "files-elsewhere"), Doctor(cloud)
    other = elsewhere(cloud, name)
    files = cloud.hosts[other].driver.host.files.pop(name)
    cloud.hosts[other].driver.host.keep_files(NOBODY, files)
    [finding] = operator.read_findings()
    assert (finding.kind, operator.fix(finding.id)) == ("files-of-nobody", 1)
    ports = operator.adopter.sources.ports
    status = host_discard.carry_out(cloud.store, HostAnswers(cloud), ports, NOBODY, other, True)
    assert status == 0
    until_clean(cloud, operator)
    assert (operator.read_findings(), cloud.hosts[other].driver.host.files) == ([], {})


def test_doctor_does_not_report_files_on_shared_storage(either: Cloud) -> None:
    """All hosts with the storage see the folder of each server."""
    either.round()
    [name] = either.create()
    either.settle()
    stray_files(either, name)
    kinds = [one.kind for one in Doctor(either).read_findings()]
    shared = len({host.driver.host.size.facts["storage"] for host in either.hosts.values()}) == 1
    assert kinds == ([] if shared else ["files-elsewhere"])


def test_cleanup_of_share_rule_shows_server_with_the_share(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without such a server, the cleanup shows no server."""
    name, operator = plant_kind(cloud, "share-rule-of-nobody"), Doctor(cloud)
    for owner in (None, name):
        if owner:
            share(cloud, owner, "active")
        [finding] = [one for one in operator.read_findings() if one.kind == "share-rule-of-nobody"]
        assert operator.fix(finding.id) == 0
        [row] = cloud.store.read(cleanups.list_all)
        assert cli_cleanups.facts(row)["server"] == owner
        assert (owner or "none") in cli_cleanups.table([row]).splitlines()[1].split()
        assert cloud.store.write(partial(cleanups.drop, cleanup_id=row.id))


def test_doctor_ignores_share_rule_for_address_of_no_host(cloud: Cloud) -> None:
    plant_kind(cloud, "share-rule-of-nobody")
    change(cloud, schema.hosts, sa.true(), host_ip="192.0.2.8")
    assert Doctor(cloud).read_findings() == []


def test_doctor_fix_waits_until_action_of_server_ends(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    name = plant_kind(cloud, "counted")
    cloud.ask(name, "os-stop")
    [finding] = operator.read_findings()
    assert operator.fix(finding.id) == 1
    assert finding.id in capsys.readouterr().out
    assert cloud.show(name).vcpus == 7
    cloud.settle()
    assert operator.fix(finding.id) == 0
    assert operator.read_findings() == []


def test_doctor_fix_writes_previous_values_to_journal(cloud: Cloud) -> None:
    """An operator can restore the previous values from the journal."""
    operator = Doctor(cloud)
    name = plant_kind(cloud, "lock")
    [finding] = operator.read_findings()
    assert operator.fix(finding.id) == 0
    row = cloud.store.read(lambda tx: actions.list_for(tx, name))[0]
    assert (row.name, row.state) == (remedies.NAME, "done")
    full = cloud.store.read(lambda tx: actions.show_by_id(tx, row.id))
    assert full is not None
    assert (full.args["finding"], full.args["was"]["locked"]) == (finding.id, True)


def test_doctor_fix_keeps_running_guest_of_offloaded_server(cloud: Cloud) -> None:
    """The server is SHELVED_OFFLOADED while its guest runs. The fix deletes the image."""
    operator = Doctor(cloud)
    name = plant_kind(cloud, "guest-elsewhere")
    cloud.images.create({"id": "33333333-3333-4333-8333-333333333333"})
    server(shelved_image_id="33333333-3333-4333-8333-333333333333")(cloud, name)
    [finding] = operator.read_findings()
    assert operator.fix(finding.id) == 0
    until_clean(cloud, operator)
    row = cloud.show(name)
    assert (row.vm_state, row.shelved_image_id) == (states.ACTIVE, None)
    assert (cloud.domains(name), cloud.images.records) == ([row.host], {})


def test_doctor_fix_keeps_attachment_of_running_guest_until_stop(cloud: Cloud) -> None:
    """The row lacks the connection, so the volume is connected anew once the server is off."""
    operator = Doctor(cloud)
    name = trial_of(cloud, "stop").server
    attached(cloud, name, connection=None)
    held = set(cloud.volumes.state.held)
    [finding] = operator.read_findings()
    assert operator.fix(finding.id) == 0
    for _ in range(30):
        cloud.round()
    [waiting] = cloud.store.read(cleanups.list_all)
    assert "stop the server first" in waiting.why
    assert set(cloud.volumes.state.held) == held
    cloud.ask(name, "os-stop")
    cloud.settle()
    until_clean(cloud, operator)
    assert (operator.read_findings(), cloud.pending()) == ([], [])
    assert not set(cloud.volumes.state.held) & held
