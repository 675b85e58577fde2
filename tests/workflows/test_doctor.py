# SPDX-License-Identifier: Apache-2.0
"""Each kind of finding is planted, found with its cause, mended by ``--fix``, and gone; what is
mended twice stays as it is."""

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
    planted,
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
        """As the command does at one look."""
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

    def found(self) -> list[Finding]:
        return self.cloud.store.read(self.look)

    def fix(self, *names: str) -> int:
        cloud, ports = self.cloud, self.adopter.sources.ports
        return doctor_fix.fix(
            cloud.store,
            names,
            self.found(),
            self.look,
            GuestCommands(
                lambda host, server: self.adopter.adopt(server, host),
                lambda host, server: host_discard.carry_out(
                    cloud.store, HostAnswers(cloud), ports, server, host, True
                ),
            ),
        )


def until_clean(cloud: Cloud, operator: Doctor) -> None:
    """Conductors, hosts and neighbours do what is left to them."""
    for _ in range(75):
        if not cloud.pending() and not operator.found():
            break
        cloud.round()
    cloud.clean_up()


@pytest.mark.parametrize("kind", PLANTS)
def test_what_is_planted_is_found_and_mended(
    cloud: Cloud, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    planted(cloud, kind)
    found = operator.found()
    assert {one.kind for one in found} == {kind, *PLANTS[kind].also}, found
    [one] = [one for one in found if one.kind == kind]
    assert len({one.id for one in found}) == len(found)
    assert operator.fix(one.id) == 0
    assert KINDS[kind].remedy in capsys.readouterr().out
    until_clean(cloud, operator)
    assert operator.found() == []
    assert operator.fix(one.id) == 0
    assert "nothing to mend" in capsys.readouterr().out
    assert operator.found() == []


@pytest.mark.parametrize("kind", FOR_OPERATORS)
def test_what_is_planted_for_an_operator_is_found_and_left(
    cloud: Cloud, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    planted(cloud, kind, FOR_OPERATORS)
    found = operator.found()
    assert {one.kind for one in found} == {kind}, found
    assert operator.fix(found[0].id) == 1
    assert KINDS[kind].remedy in capsys.readouterr().out
    with pytest.raises(errors.Conflict):
        cloud.store.write(lambda tx: remedies.mend(tx, found[0], operator.look))
    assert operator.found() == found


def test_every_kind_is_planted_and_counted() -> None:
    """The figure is in docs/reliability.md, with why some are left to an operator."""
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


def test_a_finding_that_is_gone_is_mended_by_nothing(cloud: Cloud) -> None:
    """Somebody else was quicker: what they have written stands."""
    operator = Doctor(cloud)
    name = planted(cloud, "task-state")
    [finding] = operator.found()
    server(task_state=None, vm_state=states.STOPPED)(cloud, name)
    before = cloud.show(name)
    assert cloud.store.write(lambda tx: remedies.mend(tx, finding, operator.look)) is False
    assert cloud.show(name) == before


def test_ports_of_a_guest_without_a_record_stay_until_it_is_mended(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    planted(cloud, "domain-known")
    found = {one.kind: one for one in operator.found()}
    assert operator.fix(found["port-of-nobody"].id) == 1
    assert f"--fix {found['domain-known'].id}" in capsys.readouterr().out
    assert cloud.pending() == []
    assert operator.fix(found["domain-known"].id, found["port-of-nobody"].id) == 0
    until_clean(cloud, operator)
    assert (operator.found(), len(cloud.networks.held)) == ([], 1)


def test_hosts_tell_of_guests_without_a_record_unasked(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """What they have told is found when nobody can ask them, and is over when it is mended."""
    name, nobody = boot_lost_server(cloud), set[str]()
    cloud.idle(65)
    assert [
        one.message for one in caplog.records if name in one.message and "doctor" in one.message
    ]
    [finding] = cloud.store.read(lambda tx: doctor.compare_reported(nobody, tx))
    assert (finding.kind, finding.subject, finding.facts) == ("domain-known", name, ("h1",))
    assert cloud.store.read(lambda tx: doctor.compare_reported({"h1"}, tx)) == []
    gauge = ("guests_without_record", (), 1)
    assert gauge in cloud.store.read(lambda tx: list(gauges.read(tx)))
    assert Doctor(cloud).fix(finding.id) == 0
    assert cloud.store.read(lambda tx: doctor.compare_reported(nobody, tx)) == []
    cloud.hosts["h1"].restart()
    cloud.settle()
    rows = cloud.store.read(lambda tx: tx.execute(sa.select(schema.hosts.c.unclaimed)).all())
    assert [row.unclaimed for row in rows] == [None, None]


def test_files_of_a_server_elsewhere_are_told_of_unasked(
    cloud: Cloud, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and they are found when nobody can ask its host; what is mended goes from there."""
    name = planted(cloud, "files-elsewhere")
    other = elsewhere(cloud, name)
    cloud.idle(65)
    told = [one for one in caplog.records if "has files of 1 servers" in one.message]
    assert [name in one.message for one in told] == [True]
    [finding] = cloud.store.read(lambda tx: doctor.compare_files({}, tx))
    assert (finding.kind, finding.subject, finding.facts) == ("files-elsewhere", name, (other,))
    assert cloud.store.read(lambda tx: doctor.compare_files({other: []}, tx)) == []
    assert Doctor(cloud).fix(finding.id) == 0
    assert cloud.store.read(lambda tx: doctor.compare_files({}, tx)) == []
    cloud.idle(65)
    assert (cloud.hosts[other].driver.host.files, cloud.findings()) == ({}, [])
    rows = cloud.store.read(lambda tx: tx.execute(sa.select(schema.hosts.c.unclaimed)).all())
    assert [row.unclaimed for row in rows] == [None, None]


def test_pages_of_files_keep_what_nothing_explains(cloud: Cloud) -> None:
    """Of a page only that, and what the other pages told stays; once few are told all are kept."""
    name = trial_of(cloud, "stop").server
    host, one, two = here(cloud, name), NOBODY, "f" * 8 + NOBODY[8:]

    def told(files: list[str], *between: str) -> list[str]:
        cloud.store.write(lambda tx: host_files.note(tx, host, files, between or None))
        return [server for server, _ in cloud.store.read(host_files.list_reported)]

    assert told([one, name], "", "d") == [one]
    assert told([two], "d", "") == [one, two]
    assert told([], "", "d") == [two]
    assert told([], "d", "") == []
    assert told([name]) == [name]


def test_files_that_may_be_all_that_is_left_are_an_operators(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a server whose guest is gone where its record is; after that was mended they are spare."""
    name, operator = planted(cloud, "files-elsewhere"), Doctor(cloud)
    without_domain(cloud, name)
    missing, stray = operator.found()
    assert (missing.kind, stray.kind) == ("guest-there", "files-elsewhere")
    assert operator.fix(stray.id) == 1
    assert f"--fix {missing.id}" in capsys.readouterr().out
    server(deleted=1)(cloud, name)
    spare = {one.kind: one for one in operator.found()}["files-elsewhere"]
    assert "was deleted" in spare.text


def test_files_of_nobody_go_when_an_operator_says_so(cloud: Cloud) -> None:
    name, operator = planted(cloud, "files-elsewhere"), Doctor(cloud)
    other = elsewhere(cloud, name)
    found = cloud.hosts[other].driver.host.files.pop(name)
    cloud.hosts[other].driver.host.keep_files(NOBODY, found)
    [finding] = operator.found()
    assert (finding.kind, operator.fix(finding.id)) == ("files-of-nobody", 1)
    ports = operator.adopter.sources.ports
    done = host_discard.carry_out(cloud.store, HostAnswers(cloud), ports, NOBODY, other, True)
    assert done == 0
    until_clean(cloud, operator)
    assert (operator.found(), cloud.hosts[other].driver.host.files) == ([], {})


def test_shared_storage_explains_files(either: Cloud) -> None:
    """The folder of each server is on all hosts of its storage."""
    either.round()
    [name] = either.create()
    either.settle()
    stray_files(either, name)
    kinds = [one.kind for one in Doctor(either).found()]
    shared = len({host.driver.host.size.facts["storage"] for host in either.hosts.values()}) == 1
    assert kinds == ([] if shared else ["files-elsewhere"])


def test_a_rule_that_goes_is_told_with_the_server_it_was_for(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that has the share elsewhere; none when nobody has it."""
    name, operator = planted(cloud, "share-rule-of-nobody"), Doctor(cloud)
    for said in (None, name):
        if said:
            share(cloud, said, "active")
        [finding] = [one for one in operator.found() if one.kind == "share-rule-of-nobody"]
        assert operator.fix(finding.id) == 0
        [row] = cloud.store.read(cleanups.list_all)
        assert cli_cleanups.facts(row)["server"] == said
        assert (said or "none") in cli_cleanups.table([row]).splitlines()[1].split()
        assert cloud.store.write(partial(cleanups.drop, cleanup_id=row.id))


def test_a_rule_for_a_host_of_another_cloud_is_left_alone(cloud: Cloud) -> None:
    planted(cloud, "share-rule-of-nobody")
    change(cloud, schema.hosts, sa.true(), host_ip="192.0.2.8")
    assert Doctor(cloud).found() == []


def test_a_server_that_an_action_has_is_left_to_it(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = Doctor(cloud)
    name = planted(cloud, "counted")
    cloud.ask(name, "os-stop")
    [finding] = operator.found()
    assert operator.fix(finding.id) == 1
    assert finding.id in capsys.readouterr().out
    assert cloud.show(name).vcpus == 7
    cloud.settle()
    assert operator.fix(finding.id) == 0
    assert operator.found() == []


def test_a_remedy_is_in_the_servers_journal(cloud: Cloud) -> None:
    """With what stood there before, so that it can be taken back."""
    operator = Doctor(cloud)
    name = planted(cloud, "lock")
    [finding] = operator.found()
    assert operator.fix(finding.id) == 0
    row = cloud.store.read(lambda tx: actions.list_for(tx, name))[0]
    assert (row.name, row.state) == (remedies.NAME, "done")
    full = cloud.store.read(lambda tx: actions.show_by_id(tx, row.id))
    assert full is not None
    assert (full.args["finding"], full.args["was"]["locked"]) == (finding.id, True)


def test_a_guest_that_runs_is_no_copy_of_an_image(cloud: Cloud) -> None:
    """SHELVED_OFFLOADED with a guest that runs: nothing of it is lost, the image goes."""
    operator = Doctor(cloud)
    name = planted(cloud, "guest-elsewhere")
    cloud.images.create({"id": "33333333-3333-4333-8333-333333333333"})
    server(shelved_image_id="33333333-3333-4333-8333-333333333333")(cloud, name)
    [finding] = operator.found()
    assert operator.fix(finding.id) == 0
    until_clean(cloud, operator)
    row = cloud.show(name)
    assert (row.vm_state, row.shelved_image_id) == (states.ACTIVE, None)
    assert (cloud.domains(name), cloud.images.records) == ([row.host], {})


def test_a_guest_that_runs_keeps_the_attachment_that_it_may_use(cloud: Cloud) -> None:
    """Its row does not say how it is connected: it is connected anew when the server is off."""
    operator = Doctor(cloud)
    name = trial_of(cloud, "stop").server
    attached(cloud, name, connection=None)
    held = set(cloud.volumes.state.held)
    [finding] = operator.found()
    assert operator.fix(finding.id) == 0
    for _ in range(30):
        cloud.round()
    [waiting] = cloud.store.read(cleanups.list_all)
    assert "stop the server first" in waiting.why
    assert set(cloud.volumes.state.held) == held
    cloud.ask(name, "os-stop")
    cloud.settle()
    until_clean(cloud, operator)
    assert (operator.found(), cloud.pending()) == ([], [])
    assert not set(cloud.volumes.state.held) & held
