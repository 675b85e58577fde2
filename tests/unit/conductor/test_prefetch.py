# SPDX-License-Identifier: Apache-2.0
"""Images to fetch ahead: hosts that are up are told until they say that the images are there, or a
day is over."""

from __future__ import annotations

import itertools
import logging

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.models import ImageRef, Sync
from common.domain.service_binaries import Binary
from common.store import schema
from common.store.hosts import host_images, services
from conductor.engine import reports
from conductor.engine.engine import Engine
from conductor.engine.sweep import Watch, sweep
from conductor.hosts import prefetch
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time

IMAGES = [
    ImageRef(ids.new(), "raw", 7, properties={"os_type": "linux"}),
    ImageRef(ids.new(), "qcow2", 8),
]


class Rig(Cloud):
    """Two hosts that have registered, and what they were told to fetch."""

    def __init__(self) -> None:
        time = Time()
        self.told: list[tuple[str, list[ImageRef]]] = []
        super().__init__(memory_store(time), time)
        for host in self.hosts.values():
            self.sync(host)

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        self.told.append((host, images))

    def ask(self, *hosts: str, images: list[ImageRef] = IMAGES) -> None:
        self.store.write(lambda tx: host_images.ask(tx, hosts, images))

    def look(self, seconds: float = 0, engine: Engine | None = None) -> list[str]:
        """Who was told something, ``seconds`` later."""
        self.time.pass_by(seconds)
        self.told.clear()
        prefetch.prefetch(engine or self.engine)
        return [host for host, _ in self.told]

    def says(self, host: str, cached: dict[str, str], session: int | None = None) -> None:
        agent = self.hosts[host].agent
        reports.handle(
            self.engine, [Sync(host, agent.session if session is None else session, cached=cached)]
        )

    def waiting(self) -> dict[tuple[str, str], str | None]:
        rows = self.store.read(lambda tx: tx.execute(sa.select(schema.host_images)).all())
        return {(row.host, row.image_id): row.error for row in rows}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def key(image: ImageRef) -> str:
    return image.id


def test_hosts_are_told_what_to_fetch_as_the_image_service_described_it(rig: Rig) -> None:
    rig.ask("h1", "h2")
    assert rig.look() == ["h1", "h2"]
    assert [sorted(images, key=key) for _, images in rig.told] == [sorted(IMAGES, key=key)] * 2
    assert rig.look(30) == []  # they are at it
    rig.says("h1", {image.id: "" for image in IMAGES})
    rig.says("h2", {IMAGES[0].id: ""})
    assert rig.waiting() == {("h2", IMAGES[1].id): None}
    assert rig.look(60) == ["h2"]
    assert rig.told == [("h2", [IMAGES[1]])]


def test_a_host_that_could_not_fetch_is_told_again_and_again_ever_more_rarely(rig: Rig) -> None:
    rig.ask("h1", images=IMAGES[:1])
    times = []
    for minute in range(8 * 60):
        if rig.look(60):
            times.append(minute)
            rig.says("h1", {IMAGES[0].id: "the image service does not answer"})
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert (pauses[0], len(times) < 20) == (1, True)
    assert rig.waiting() == {("h1", IMAGES[0].id): "the image service does not answer"}


def test_after_a_day_it_is_given_up_and_the_log_says_so(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.ask("h1", images=IMAGES[:1])
    rig.look()
    rig.says("h1", {IMAGES[0].id: "no room\x00" + "x" * 5000})
    rig.time.pass_by(24 * 3600 - 60)
    rig.ask("h2", images=IMAGES[:1])
    with caplog.at_level(logging.WARNING):
        assert rig.look(120) == ["h2"]
    assert list(rig.waiting()) == [("h2", IMAGES[0].id)]
    [record] = [record for record in caplog.records if "given up" in record.getMessage()]
    assert f"host h1 was asked to fetch image {IMAGES[0].id} ahead" in record.getMessage()
    assert "no room" in record.getMessage()
    assert len(record.getMessage()) < 1500


@pytest.mark.parametrize("table", [schema.heartbeats, schema.services])
def test_a_host_that_is_down_is_told_when_it_is_back(rig: Rig, table: sa.Table) -> None:
    down = {"up": False} if table is schema.heartbeats else {"forced_down": True}
    with rig.store.begin() as tx:
        tx.execute(sa.update(table).where(table.c.host == "h1").values(**down))
    rig.ask("h1", "h2")
    assert rig.look() == ["h2"]
    rig.store.write(lambda tx: services.beat(tx, ["h1"], Binary.COMPUTE))
    with rig.store.begin() as tx:
        tx.execute(sa.update(schema.services).values(forced_down=False))
    assert rig.look() == ["h1"]


def test_what_a_host_of_another_session_says_does_not_count(rig: Rig) -> None:
    rig.ask("h1", images=IMAGES[:1])
    rig.says("h1", {IMAGES[0].id: ""}, session=99)
    assert list(rig.waiting()) == [("h1", IMAGES[0].id)]


def test_what_was_not_asked_for_is_passed_over(rig: Rig) -> None:
    rig.says("h1", {IMAGES[0].id: "", IMAGES[1].id: "broken"})
    assert rig.waiting() == {}


def test_two_conductors_do_not_tell_a_host_twice(rig: Rig) -> None:
    rig.ask("h1")
    rows = rig.store.read(lambda tx: host_images.due(tx, 10))
    assert rig.look(engine=rig.conductor("c2/2")) == ["h1"]
    # we read before it marked them
    assert rig.store.write(lambda tx: host_images.take(tx, rows)) == {}


def test_the_sweep_looks_every_few_seconds(rig: Rig) -> None:
    rig.ask("h1")
    watch = Watch()
    sweep(rig.engine, watch, [], True)
    assert [host for host, _ in rig.told] == ["h1"]
    rig.ask("h1")
    for _ in range(3):
        sweep(rig.engine, watch, [], True)
    assert len(rig.told) == 1
    rig.time.pass_by(prefetch.PERIOD_SECONDS)
    sweep(rig.engine, watch, [], True)
    assert len(rig.told) == 2


def test_a_conductor_whose_service_was_deleted_comes_back(rig: Rig) -> None:
    rig.store.write(lambda tx: services.enrol(tx, "c1", Binary.CONDUCTOR))
    [row] = rig.store.read(lambda tx: services.list_all(tx, "c1"))
    rig.store.write(lambda tx: services.remove(tx, row))
    sweep(rig.engine, Watch(), [], True)
    [back] = rig.store.read(lambda tx: services.list_all(tx, "c1"))
    assert (back.uuid != row.uuid, back.up) == (True, True)
