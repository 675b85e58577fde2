# SPDX-License-Identifier: Apache-2.0
"""Prefetch of images: requests to hosts that are up, repeats, failures and the limit of a day."""

from __future__ import annotations

import itertools
import logging

import pytest
import sqlalchemy as sa

from common.domain import ids
from common.domain.models import ImageRef, Sync
from common.domain.service_binaries import Binary
from common.service.notification_options import NotificationSettings
from common.store import schema
from common.store.hosts import cached_images, host_images, services
from conductor.engine import reports
from conductor.engine.engine import Engine
from conductor.engine.sweep import Watch, sweep
from conductor.hosts import prefetch
from tests.log_lines import logged_fields, rendered_lines
from tests.schemas import memory_store
from tests.workflows.simulator import Cloud, Time

IMAGES = [
    ImageRef(ids.new(), "raw", 7, properties={"os_type": "linux"}),
    ImageRef(ids.new(), "qcow2", 8),
]


class PrefetchCloud(Cloud):
    """A cloud with two registered hosts. ``sent`` records the prefetch messages to them."""

    def __init__(self) -> None:
        time = Time()
        self.sent: list[tuple[str, list[ImageRef]]] = []
        super().__init__(memory_store(time), time)
        for host in self.hosts.values():
            self.sync(host)

    def cache_images(self, host: str, images: list[ImageRef]) -> None:
        self.sent.append((host, images))

    def request_images(self, *hosts: str, images: list[ImageRef] = IMAGES) -> None:
        self.store.write(lambda tx: host_images.ask(tx, hosts, images))

    def run_prefetch(self, seconds: float = 0, engine: Engine | None = None) -> list[str]:
        """Run the prefetch after ``seconds`` and return the hosts that received a message."""
        self.time.pass_by(seconds)
        self.sent.clear()
        prefetch.prefetch(engine or self.engine)
        return [host for host, _ in self.sent]

    def report_cached(self, host: str, cached: dict[str, str], session: int | None = None) -> None:
        agent = self.hosts[host].agent
        reports.handle(
            self.engine, [Sync(host, agent.session if session is None else session, cached=cached)]
        )

    def waiting_images(self) -> dict[tuple[str, str], str | None]:
        rows = self.store.read(lambda tx: tx.execute(sa.select(schema.host_images)).all())
        return {(row.host, row.image_id): row.error for row in rows}


@pytest.fixture
def cloud() -> PrefetchCloud:
    return PrefetchCloud()


def key(image: ImageRef) -> str:
    return image.id


def test_prefetch_sends_missing_images_to_hosts_until_they_are_cached(cloud: PrefetchCloud) -> None:
    cloud.request_images("h1", "h2")
    assert cloud.run_prefetch() == ["h1", "h2"]
    assert [sorted(images, key=key) for _, images in cloud.sent] == [sorted(IMAGES, key=key)] * 2
    # The hosts still fetch the images.
    assert cloud.run_prefetch(30) == []
    cloud.report_cached("h1", {image.id: "" for image in IMAGES})
    cloud.report_cached("h2", {IMAGES[0].id: ""})
    assert cloud.waiting_images() == {("h2", IMAGES[1].id): None}
    assert cloud.run_prefetch(60) == ["h2"]
    assert cloud.sent == [("h2", [IMAGES[1]])]


def test_prefetch_of_failing_image_is_repeated_with_growing_pauses(cloud: PrefetchCloud) -> None:
    cloud.request_images("h1", images=IMAGES[:1])
    times = []
    for minute in range(8 * 60):
        if cloud.run_prefetch(60):
            times.append(minute)
            cloud.report_cached("h1", {IMAGES[0].id: "the image service does not answer"})
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert (pauses[0], len(times) < 20) == (1, True)
    assert cloud.waiting_images() == {("h1", IMAGES[0].id): "the image service does not answer"}


def test_prefetch_ends_after_a_day_with_a_warning(
    cloud: PrefetchCloud, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.request_images("h1", images=IMAGES[:1])
    cloud.run_prefetch()
    cloud.report_cached("h1", {IMAGES[0].id: "no room\x00" + "x" * 5000})
    cloud.time.pass_by(24 * 3600 - 60)
    cloud.request_images("h2", images=IMAGES[:1])
    with caplog.at_level(logging.WARNING):
        assert cloud.run_prefetch(120) == ["h2"]
    assert list(cloud.waiting_images()) == [("h2", IMAGES[0].id)]
    [fields] = logged_fields(
        caplog, "a host has not fetched an image ahead within a day, and the request is deleted"
    )
    assert (fields["host"], fields["image"]) == ("h1", IMAGES[0].id)
    assert "no room" in str(fields["problem"])
    assert max(map(len, rendered_lines(caplog))) < 1500


def test_prefetch_warning_after_a_day_leaves_out_cached_images(
    cloud: PrefetchCloud, caplog: pytest.LogCaptureFixture
) -> None:
    """With notifications, the row of a cached image waits for the other images of the host."""
    cloud.store.notify_with(NotificationSettings("c1"))
    mark = {cached_images.MARK: {"request": ids.new(), "aggregate": 1, "hosts": 1}}
    cloud.store.write(lambda tx: host_images.ask(tx, ["h1"], IMAGES, mark))
    cloud.run_prefetch()
    cloud.report_cached("h1", {IMAGES[0].id: ""})
    with caplog.at_level(logging.WARNING):
        cloud.run_prefetch(24 * 3600 + 60)
    assert cloud.waiting_images() == {}
    [fields] = logged_fields(
        caplog, "a host has not fetched an image ahead within a day, and the request is deleted"
    )
    assert fields["image"] == IMAGES[1].id


@pytest.mark.parametrize("table", [schema.heartbeats, schema.services])
def test_prefetch_waits_until_a_down_host_is_up(cloud: PrefetchCloud, table: sa.Table) -> None:
    down = {"up": False} if table is schema.heartbeats else {"forced_down": True}
    with cloud.store.begin() as tx:
        tx.execute(sa.update(table).where(table.c.host == "h1").values(**down))
    cloud.request_images("h1", "h2")
    assert cloud.run_prefetch() == ["h2"]
    cloud.store.write(lambda tx: services.beat(tx, ["h1"], Binary.COMPUTE))
    with cloud.store.begin() as tx:
        tx.execute(sa.update(schema.services).values(forced_down=False))
    assert cloud.run_prefetch() == ["h1"]


def test_prefetch_ignores_cached_images_reported_by_another_session(cloud: PrefetchCloud) -> None:
    cloud.request_images("h1", images=IMAGES[:1])
    cloud.report_cached("h1", {IMAGES[0].id: ""}, session=99)
    assert list(cloud.waiting_images()) == [("h1", IMAGES[0].id)]


def test_prefetch_ignores_reports_of_images_without_a_request(cloud: PrefetchCloud) -> None:
    cloud.report_cached("h1", {IMAGES[0].id: "", IMAGES[1].id: "broken"})
    assert cloud.waiting_images() == {}


def test_prefetch_of_two_conductors_sends_one_message_to_a_host(cloud: PrefetchCloud) -> None:
    cloud.request_images("h1")
    rows = cloud.store.read(lambda tx: host_images.due(tx, 10))
    assert cloud.run_prefetch(engine=cloud.conductor("c2/2")) == ["h1"]
    # This conductor read the rows before the other conductor marked them.
    assert cloud.store.write(lambda tx: host_images.take(tx, rows)) == {}


def test_sweep_runs_the_prefetch_every_period(cloud: PrefetchCloud) -> None:
    cloud.request_images("h1")
    watch = Watch()
    sweep(cloud.engine, watch, [], True)
    assert [host for host, _ in cloud.sent] == ["h1"]
    cloud.request_images("h1")
    for _ in range(3):
        sweep(cloud.engine, watch, [], True)
    assert len(cloud.sent) == 1
    cloud.time.pass_by(prefetch.PERIOD_SECONDS)
    sweep(cloud.engine, watch, [], True)
    assert len(cloud.sent) == 2


def test_sweep_enrols_the_conductor_again_after_its_service_was_deleted(
    cloud: PrefetchCloud,
) -> None:
    cloud.store.write(lambda tx: services.enrol(tx, "c1", Binary.CONDUCTOR))
    [row] = cloud.store.read(lambda tx: services.list_all(tx, "c1"))
    cloud.store.write(lambda tx: services.remove(tx, row))
    sweep(cloud.engine, Watch(), [], True)
    [back] = cloud.store.read(lambda tx: services.list_all(tx, "c1"))
    assert (back.uuid != row.uuid, back.up) == (True, True)
