# SPDX-License-Identifier: Apache-2.0
"""The threads that run jobs. Jobs of one volume or snapshot run in the order of their commits.

Jobs of an earlier process are run too. Only the transaction that records the result deletes a job.
"""

import threading
import time
from collections.abc import Callable

from sqlalchemy import Row, delete, select, update

from common.service.log import get_logger
from deploy.one_machine.services.external import Later
from deploy.one_machine.services.volume.files import Check
from deploy.one_machine.services.volume.jobs import KINDS, JobKind, NotWanted, VolumeJob
from deploy.one_machine.services.volume.neighbours import ImageRefused
from deploy.one_machine.services.volume.schema import jobs
from deploy.one_machine.services.volume.service import VolumeChange, VolumeService

LOG = get_logger("standalone.volume")
THREADS, LOOK_SECONDS, CHECK_SECONDS = 3, 1.0, 1.0
MAX_PAUSE_SECONDS = 60.0


class JobWorker:
    """The worker threads of the process."""

    def __init__(self, service: VolumeService, clock: Callable[[], float] = time.time) -> None:
        self._service, self._clock = service, clock
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._busy: set[str] = set()

    def start(self) -> None:
        """Start the threads that run jobs, and a thread that calls `settle_exports` repeatedly."""
        for number in range(THREADS):
            threading.Thread(target=self._run, name=f"jobs-{number}", daemon=True).start()
        threading.Thread(target=self._watch, name="exports", daemon=True).start()

    def end(self) -> None:
        """Take no more jobs, and let running jobs stop at their next check.

        This function does not wait for them. The next process repeats the stopped jobs.
        """
        self._ending.set()
        self._service.has_jobs.set()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                if not self.step():
                    self._service.has_jobs.wait(LOOK_SECONDS)
                    self._service.has_jobs.clear()
            except Exception:
                LOG.exception("a round of the worker failed; the next round retries")
                self._ending.wait(LOOK_SECONDS)

    def _watch(self) -> None:
        while not self._ending.is_set():
            try:
                self._service.settle_exports()
            except Exception:
                LOG.exception(
                    "the exports of volumes to other hosts cannot be updated; the next round retries"
                )
            self._ending.wait(LOOK_SECONDS)

    def step(self) -> bool:
        """Make one attempt at the next job that can run.

        Returns:
            True after the attempt, also if it failed. False if no job can run now.
        """
        with self._lock:
            row = self._next()
            if row is None:
                return False
            self._busy.add(row.target_id)
        try:
            self._do(row)
        finally:
            with self._lock:
                self._busy.discard(row.target_id)
            # Jobs of the same target can run now.
            self._service.has_jobs.set()
        return True

    def _next(self) -> Row[tuple[object, ...]] | None:
        with self._service.database.read() as connection:
            rows = connection.execute(select(jobs).order_by(jobs.c.id)).all()
        waiting = set(self._busy)
        for row in rows:
            if row.target_id not in waiting and row.not_before <= self._clock():
                return row
            # A later job of the same target must wait.
            waiting.add(row.target_id)
        return None

    def _do(self, row: Row[tuple[object, ...]]) -> None:
        kind = KINDS[row.kind]
        with self._service.database.read() as connection:
            target = (
                None
                if kind.table is None
                else connection.execute(
                    kind.table.select().where(kind.table.c.id == row.target_id)
                ).first()
            )
        job = VolumeJob(row.id, row.kind, row.target_id, row.source_id, row.arguments, target)
        check = self._check(kind, job)
        try:
            check()
            kind.work(self._service, job, check)
        except NotWanted:
            kind.abandon(self._service, job)
            self._end(job, lambda change, job: None)
        except Later as error:
            self._postpone(kind, job, row.attempts + 1, error)
        except (ImageRefused, OSError) as error:
            LOG.error("a job failed", job=row.kind, target=row.target_id, problem=error)
            kind.abandon(self._service, job)
            self._end(job, kind.failed)
        except Exception:
            LOG.exception("a job failed unexpectedly", job=row.kind, target=row.target_id)
            self._postpone(kind, job, row.attempts + 1, Later("an unexpected error"))
        else:
            self._end(job, kind.done)

    def _check(self, kind: JobKind, job: VolumeJob) -> Check:
        last_check = 0.0

        def check() -> None:
            nonlocal last_check
            if self._ending.is_set():
                raise Later("the service ends")
            if kind.table is None or time.monotonic() < last_check + CHECK_SECONDS:
                return
            last_check = time.monotonic()
            with self._service.database.read() as connection:
                status = connection.execute(
                    select(kind.table.c.status).where(kind.table.c.id == job.target_id)
                ).scalar()
            if status is None or (status == "deleting" and not kind.removes):
                raise NotWanted

        return check

    def _end(self, job: VolumeJob, record: Callable[[VolumeChange, VolumeJob], None]) -> None:
        with self._service.change() as change:
            result = change.connection.execute(delete(jobs).where(jobs.c.id == job.id))
            if result.rowcount == 1:
                record(change, job)

    def _postpone(self, kind: JobKind, job: VolumeJob, attempts: int, error: Later) -> None:
        if self._ending.is_set():
            # The next process runs the job.
            return
        LOG.warning("an attempt of a job failed", job=job.kind, target=job.target_id, problem=error)
        if attempts >= kind.attempts:
            kind.abandon(self._service, job)
            self._end(job, kind.failed)
            return
        pause = min(MAX_PAUSE_SECONDS, 2.0**attempts / 2)
        with self._service.database.write() as connection:
            connection.execute(
                update(jobs)
                .where(jobs.c.id == job.id)
                .values(attempts=attempts, not_before=self._clock() + pause)
            )
