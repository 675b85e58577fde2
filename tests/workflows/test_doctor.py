# SPDX-License-Identifier: Apache-2.0
"""Tests of ``kilonova doctor`` and ``--fix`` with each kind of fault in the simulated cloud.

A test plants a fault, and the doctor reports a finding of this kind. After the fix, conductors,
hosts and external services complete the repair, and the doctor reports no finding.
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
from tests.log_lines import logged_fields
from tests.workflows.planted import (
    NOBODY,
    PLANTS,
    add_share,
    attach_volume,
    change,
    change_server,
    elsewhere,
    here,
    leave_stray_files,
    plant_kind,
    remove_domain,
)
from tests.workflows.planted_for_operators import FOR_OPERATORS
from tests.workflows.scenarios import trial_of
from tests.workflows.simulator import Cloud
from tests.workflows.test_adopt import Adopter, HostAnswers, boot_lost_server

PAGE = Path(__file__).resolve().parents[2] / "docs/reliability.md"


class Doctor:
    """Runs the checks and fixes of ``kilonova doctor`` on a simulated cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.adopter = cloud, Adopter(cloud)

    def look(self, tx: Connection) -> list[Finding]:
        """Compare the database with hosts and external services, and return the findings."""
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
            *doctor.compare_rules(self.cloud.shares.list_rules(), tx),
            *doctor.compare_guests(disks, tx),
            *doctor.compare_ports(list(self.cloud.networks.held.values()), tx),
            *doctor.compare_volumes(self.cloud.volumes.list_attachments(), tx),
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


def run_until_clean(cloud: Cloud, operator: Doctor) -> None:
    """Run rounds until no pending cleanup and no finding is left."""
    for _ in range(75):
        if not cloud.pending() and not operator.read_findings():
            break
        cloud.round()
    cloud.clean_up()


@pytest.mark.parametrize("kind", PLANTS)
def test_doctor_finds_planted_fault_of_each_fixable_kind_and_fix_ends_it(
    cloud: Cloud, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    plant_kind(cloud, kind)
    findings = operator.read_findings()
    assert {finding.kind for finding in findings} == {kind, *PLANTS[kind].also}, findings
    [planted] = [finding for finding in findings if finding.kind == kind]
    assert len({finding.id for finding in findings}) == len(findings)
    assert operator.fix(planted.id) == 0
    assert KINDS[kind].remedy in capsys.readouterr().out
    run_until_clean(cloud, operator)
    assert operator.read_findings() == []
    assert operator.fix(planted.id) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert operator.read_findings() == []


@pytest.mark.parametrize("kind", FOR_OPERATORS)
def test_doctor_finds_planted_fault_for_operators_and_fix_is_refused(
    cloud: Cloud, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    plant_kind(cloud, kind, FOR_OPERATORS)
    findings = operator.read_findings()
    assert {finding.kind for finding in findings} == {kind}, findings
    assert operator.fix(findings[0].id) == 1
    assert KINDS[kind].remedy in capsys.readouterr().out
    with pytest.raises(errors.Conflict):
        cloud.store.write(lambda tx: remedies.mend(tx, findings[0], operator.look))
    assert operator.read_findings() == findings


def test_doctor_kinds_are_all_planted_and_listed_in_reliability_page() -> None:
    """The page shows the numbers of kinds and, for each kind without a fix, the reason."""
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
    for kind, plant in FOR_OPERATORS.items():
        assert f"| `{kind}` | {plant.why} |" in page
    mended_by_rows = {name for name, kind in KINDS.items() if kind.way is not Mender.GUEST}
    assert remedies.REMEDIES.keys() == PLANTS.keys() & mended_by_rows
    assert len(PLANTS) >= 30


def test_doctor_fix_changes_no_row_when_fault_was_corrected_meanwhile(cloud: Cloud) -> None:
    """The row is corrected between the check and the fix."""
    operator = Doctor(cloud)
    name = plant_kind(cloud, "task-state")
    [finding] = operator.read_findings()
    change_server(task_state=None, vm_state=states.STOPPED)(cloud, name)
    before = cloud.show(name)
    assert cloud.store.write(lambda tx: remedies.mend(tx, finding, operator.look)) is False
    assert cloud.show(name) == before


def test_doctor_fix_keeps_ports_until_guest_without_record_is_adopted(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    plant_kind(cloud, "domain-known")
    findings = {finding.kind: finding for finding in operator.read_findings()}
    assert operator.fix(findings["port-of-nobody"].id) == 1
    assert f"--fix {findings['domain-known'].id}" in capsys.readouterr().out
    assert cloud.pending() == []
    assert operator.fix(findings["domain-known"].id, findings["port-of-nobody"].id) == 0
    run_until_clean(cloud, operator)
    assert (operator.read_findings(), len(cloud.networks.held)) == ([], 1)


def test_host_report_of_guest_without_record_is_logged_and_found_by_doctor(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor uses the stored report if the host does not answer. A fix ends the report."""
    name, no_hosts = boot_lost_server(cloud), set[str]()
    cloud.idle(65)
    assert {"host": "h1", "count": 1, "servers": name} in logged_fields(
        caplog,
        "a host has guests without a record; see: kilonova doctor, then kilonova host adopt or discard",
    )
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


def test_host_report_of_stray_files_is_logged_once_and_found_by_doctor(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor uses the stored report if the host does not answer. A fix deletes the files."""
    name = plant_kind(cloud, "files-elsewhere")
    other = elsewhere(cloud, name)
    cloud.idle(65)
    assert logged_fields(
        caplog, "a host has files of servers without a guest; see: kilonova doctor"
    ) == [{"host": other, "count": 1, "servers": name}]
    [finding] = cloud.store.read(lambda tx: doctor.compare_files({}, tx))
    assert (finding.kind, finding.subject, finding.facts) == ("files-elsewhere", name, (other,))
    assert cloud.store.read(lambda tx: doctor.compare_files({other: []}, tx)) == []
    assert Doctor(cloud).fix(finding.id) == 0
    assert cloud.store.read(lambda tx: doctor.compare_files({}, tx)) == []
    cloud.idle(65)
    assert (cloud.hosts[other].driver.host.files, cloud.findings()) == ({}, [])
    rows = cloud.store.read(lambda tx: tx.execute(sa.select(schema.hosts.c.unclaimed)).all())
    assert [row.unclaimed for row in rows] == [None, None]


def test_host_files_page_stores_stray_files_and_replaces_only_its_range(cloud: Cloud) -> None:
    """A page replaces the files of a range of servers. A report without a range replaces all."""
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
    """The stray files may be the only copy until the server is deleted."""
    name, operator = plant_kind(cloud, "files-elsewhere"), Doctor(cloud)
    remove_domain(cloud, name)
    missing, stray = operator.read_findings()
    assert (missing.kind, stray.kind) == ("guest-there", "files-elsewhere")
    assert operator.fix(stray.id) == 1
    assert f"--fix {missing.id}" in capsys.readouterr().out
    change_server(deleted=1)(cloud, name)
    stray = {finding.kind: finding for finding in operator.read_findings()}["files-elsewhere"]
    assert "was deleted" in stray.text


def test_discard_deletes_files_of_unknown_server_kept_by_fix(cloud: Cloud) -> None:
    name, operator = plant_kind(cloud, "files-elsewhere"), Doctor(cloud)
    other = elsewhere(cloud, name)
    files = cloud.hosts[other].driver.host.files.pop(name)
    cloud.hosts[other].driver.host.keep_files(NOBODY, files)
    [finding] = operator.read_findings()
    assert (finding.kind, operator.fix(finding.id)) == ("files-of-nobody", 1)
    ports = operator.adopter.sources.ports
    status = host_discard.carry_out(cloud.store, HostAnswers(cloud), ports, NOBODY, other, True)
    assert status == 0
    run_until_clean(cloud, operator)
    assert (operator.read_findings(), cloud.hosts[other].driver.host.files) == ([], {})


def test_doctor_reports_stray_files_on_local_but_not_on_shared_storage(either: Cloud) -> None:
    """All hosts with the storage list the folder of each server."""
    either.round()
    [name] = either.create()
    either.settle()
    leave_stray_files(either, name)
    kinds = [finding.kind for finding in Doctor(either).read_findings()]
    shared = len({host.driver.host.size.facts["storage"] for host in either.hosts.values()}) == 1
    assert kinds == ([] if shared else ["files-elsewhere"])


def test_cleanup_list_row_of_share_rule_shows_server_with_share_or_none(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no server has the share, the cleanup shows no server."""
    name, operator = plant_kind(cloud, "share-rule-of-nobody"), Doctor(cloud)
    for owner in (None, name):
        if owner:
            add_share(cloud, owner, "active")
        [finding] = [
            finding
            for finding in operator.read_findings()
            if finding.kind == "share-rule-of-nobody"
        ]
        assert operator.fix(finding.id) == 0
        [row] = cloud.store.read(cleanups.list_all)
        assert cli_cleanups.facts(row)["server"] == owner
        assert (owner or "none") in cli_cleanups.table([row]).splitlines()[1].split()
        assert cloud.store.write(partial(cleanups.cancel, cleanup_id=row.id))


def test_doctor_ignores_share_rule_for_address_of_no_host(cloud: Cloud) -> None:
    plant_kind(cloud, "share-rule-of-nobody")
    change(cloud, schema.hosts, sa.true(), host_ip="192.0.2.8")
    assert Doctor(cloud).read_findings() == []


def test_doctor_fix_is_refused_while_action_of_server_runs(
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


def test_doctor_fix_sets_active_for_offloaded_server_with_running_guest(cloud: Cloud) -> None:
    """The record is SHELVED_OFFLOADED, but the guest runs. The fix deletes the image."""
    operator = Doctor(cloud)
    name = plant_kind(cloud, "guest-elsewhere")
    cloud.images.create({"id": "33333333-3333-4333-8333-333333333333"})
    change_server(shelved_image_id="33333333-3333-4333-8333-333333333333")(cloud, name)
    [finding] = operator.read_findings()
    assert operator.fix(finding.id) == 0
    run_until_clean(cloud, operator)
    row = cloud.show(name)
    assert (row.vm_state, row.shelved_image_id) == (states.ACTIVE, None)
    assert (cloud.domains(name), cloud.images.records) == ([row.host], {})


def test_doctor_fix_keeps_volume_attachment_of_running_guest_until_stop(cloud: Cloud) -> None:
    """The row has lost the connection. A cleanup reconnects the volume when the server is off."""
    operator = Doctor(cloud)
    name = trial_of(cloud, "stop").server
    attach_volume(cloud, name, connection=None)
    attachments = set(cloud.volumes.state.held)
    [finding] = operator.read_findings()
    assert operator.fix(finding.id) == 0
    for _ in range(30):
        cloud.round()
    [cleanup] = cloud.store.read(cleanups.list_all)
    assert "Stop the server." in cleanup.why
    assert set(cloud.volumes.state.held) == attachments
    cloud.ask(name, "os-stop")
    cloud.settle()
    run_until_clean(cloud, operator)
    assert (operator.read_findings(), cloud.pending()) == ([], [])
    assert not set(cloud.volumes.state.held) & attachments
