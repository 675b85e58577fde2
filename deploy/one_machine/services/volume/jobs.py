# SPDX-License-Identifier: Apache-2.0
"""Long work as rows of the table of jobs: create, copy, fill and remove files.

A job has three functions. `work` changes files and can be repeated from any point. `done` updates
the rows after success, and `failed` after a failure, in the transaction that deletes the job. After
a crash the job is still there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Table, delete

from deploy.one_machine.services.database import DbRow, DbValues
from deploy.one_machine.services.external import Later
from deploy.one_machine.services.volume import qemu_img
from deploy.one_machine.services.volume.files import GIGABYTE, Check
from deploy.one_machine.services.volume.neighbours import ImageRefused
from deploy.one_machine.services.volume.schema import attachments, snapshots, volumes
from deploy.one_machine.services.volume.service import VolumeChange, VolumeService
from deploy.one_machine.services.volume.states import update_status


class NotWanted(Exception):
    """The target of the job is deleted, or is being deleted."""


@dataclass(frozen=True)
class VolumeJob:
    """A row of the table of jobs, with the row of its target."""

    id: int
    kind: str
    target_id: str
    source_id: str | None
    arguments: DbValues
    target: DbRow | None

    @property
    def size(self) -> int:
        """The size of the target in GiB."""
        assert self.target is not None, "a job of a kind without a table has no size"
        return int(self.target.size)


@dataclass(frozen=True)
class JobKind:
    """The functions of a kind of job.

    Attributes:
        table: The table of the target, or None.
        work: Changes files, or calls another service. The last argument is a function that raises
            when the work should stop. Later means that the work is tried again.
        done: Updates the rows after success.
        failed: Updates the rows after ImageRefused or OSError, or after the last attempt.
        attempts: The number of attempts, if they end with Later or an unexpected error.
        removes: True if the job continues although its target is being deleted.
        abandon: Removes at other services what the job leaves there, after a failure and before
            ``failed``, or if the target is deleted. Raises nothing, and may be repeated.
    """

    table: Table | None
    work: Callable[[VolumeService, VolumeJob, Check], None]
    done: Callable[[VolumeChange, VolumeJob], None]
    failed: Callable[[VolumeChange, VolumeJob], None]
    attempts: int = 10
    removes: bool = False
    abandon: Callable[[VolumeService, VolumeJob], None] = lambda service, job: None


# --- files ---


def _make_blank(service: VolumeService, job: VolumeJob, check: Check) -> None:
    service.files.make_blank(service.files.path("volume", job.target_id), job.size)


def _copy(service: VolumeService, job: VolumeJob, check: Check) -> None:
    kind = "snapshot" if job.kind == "snapshot" else "volume"
    source = service.files.path(job.arguments["read"], str(job.source_id))
    service.files.copy(source, service.files.path(kind, job.target_id), job.size, check)


def _download(service: VolumeService, job: VolumeJob, check: Check) -> None:
    files, image, limit = service.files, job.arguments["image_id"], job.size * GIGABYTE
    path = files.path("volume", job.target_id)
    download = files.part(files.path("download", job.target_id))
    try:
        maximum = service.settings.max_image_gigabytes * GIGABYTE
        service.images.download(image, download, maximum, check)
        qemu_img.inspect(download, job.arguments["disk_format"], limit)
        part = files.part(path)
        if qemu_img.READABLE[job.arguments["disk_format"]][1] == "raw":
            os.replace(download, part)
        else:
            qemu_img.unpack(download, job.arguments["disk_format"], part, check)
        check()
        files.finish(part, path, limit)
    finally:
        download.unlink(missing_ok=True)


def _upload(service: VolumeService, job: VolumeJob, check: Check) -> None:
    files, disk_format = service.files, job.arguments["disk_format"]
    source = files.path("volume", job.target_id)
    copy_path, packed_path = (files.path(name, job.target_id) for name in ("upload", "packed"))
    try:
        # A volume in use is copied first if blocks can be shared, so that the data are consistent.
        if job.arguments["clone"]:
            files.copy(source, copy_path, job.size, check)
            source = copy_path
        if disk_format != "raw":
            part = files.part(packed_path)
            qemu_img.pack(source, disk_format, part, check)
            source = part
        if not service.images.upload(job.arguments["image_id"], source, check):
            raise ImageRefused(
                f"the image service refuses the data of image {job.arguments['image_id']}"
            )
    finally:
        files.remove(copy_path)
        files.remove(packed_path)


def _remove_image(service: VolumeService, job: VolumeJob) -> None:
    service.images.remove_unfinished(job.arguments["image_id"])


def _grow(service: VolumeService, job: VolumeJob, check: Check) -> None:
    service.files.grow(service.files.path("volume", job.target_id), job.arguments["size"])


def _remove(kind: str) -> Callable[[VolumeService, VolumeJob, Check], None]:
    def remove(service: VolumeService, job: VolumeJob, check: Check) -> None:
        for key in job.arguments.get("snapshots", []):
            service.files.remove(service.files.path("snapshot", key))
        service.files.remove(service.files.path(kind, job.target_id))

    return remove


def _send_events(service: VolumeService, job: VolumeJob, check: Check) -> None:
    if not service.compute.notify(job.arguments["events"]):
        raise Later("the compute service does not accept events now")


# --- rows ---


def _set(
    table: Table, before: tuple[str, ...], **values: object
) -> Callable[[VolumeChange, VolumeJob], None]:
    """Return a function for ``JobKind.done`` or ``failed`` that sets columns of the target.

    The function does nothing if the target's status is not in ``before``, for example because an
    admin has reset the status.
    """

    def change_row(change: VolumeChange, job: VolumeJob) -> None:
        change.set(table, job.target_id, values, table.c.status.in_(before))

    return change_row


def _restore_status(before: str) -> Callable[[VolumeChange, VolumeJob], None]:
    """Return a function for ``JobKind.done`` or ``failed`` that updates the status of the volume.

    The status follows from the volume's attachments, some of which may have ended since the job was
    created. The function does nothing if the status is not ``before``, for example because an admin
    has reset the status.
    """

    def restore(change: VolumeChange, job: VolumeJob) -> None:
        update_status(change, job.target_id, volumes.c.status == before)

    return restore


def _record_reimage(change: VolumeChange, job: VolumeJob) -> None:
    metadata = job.arguments["image_metadata"]
    change.set(volumes, job.target_id, {"image_metadata": metadata, "bootable": True})
    update_status(change, job.target_id, volumes.c.status == "downloading")
    _order_events(change, "volume-reimaged", job)


def _record_failed_reimage(change: VolumeChange, job: VolumeJob) -> None:
    _set(volumes, ("downloading",), status="error", previous_status=None)(change, job)


def _record_extension(change: VolumeChange, job: VolumeJob) -> None:
    change.set(volumes, job.target_id, {"size": job.arguments["size"]})
    _restore_status("extending")(change, job)
    _order_events(change, "volume-extended", job)


def _record_failed_extension(change: VolumeChange, job: VolumeJob) -> None:
    _set(volumes, ("extending",), status="error_extending")(change, job)


def _record_failed_delete(change: VolumeChange, job: VolumeJob) -> None:
    failed = {"status": "error_deleting"}
    change.set(volumes, job.target_id, failed, volumes.c.status == "deleting")
    for key in job.arguments.get("snapshots", []):
        change.set(snapshots, key, failed, snapshots.c.status == "deleting")


def _order_events(change: VolumeChange, name: str, job: VolumeJob) -> None:
    """Add a job that sends the compute service an event for each attachment of a server.

    If the volume has no such attachment, add no job.

    Args:
        change: The transaction.
        name: The name of the events, for example "volume-extended".
        job: The completed job of the volume.
    """
    rows = change.connection.execute(
        attachments.select().where(
            attachments.c.volume_id == job.target_id, attachments.c.instance.is_not(None)
        )
    )
    events = [
        {"name": name, "server_uuid": row.instance, "tag": job.target_id, "status": "completed"}
        for row in rows
    ]
    if events:
        change.order("tell", f"events-{job.target_id}", events=events)


def _delete_row(table: Table) -> Callable[[VolumeChange, VolumeJob], None]:
    def remove_row(change: VolumeChange, job: VolumeJob) -> None:
        if table is volumes:
            for child_table in (attachments, snapshots):
                change.connection.execute(
                    delete(child_table).where(child_table.c.volume_id == job.target_id)
                )
        change.remove(table, job.target_id)

    return remove_row


def _do_nothing(change: VolumeChange, job: VolumeJob) -> None:
    """Change no rows."""


_AVAILABLE = {"status": "available"}
_NEW = _set(volumes, ("creating", "downloading"), **_AVAILABLE)
_NOT_MADE = _set(volumes, ("creating", "downloading"), status="error")
KINDS: Mapping[str, JobKind] = {
    "create": JobKind(volumes, _make_blank, _NEW, _NOT_MADE),
    "copy": JobKind(volumes, _copy, _NEW, _NOT_MADE),
    "download": JobKind(volumes, _download, _NEW, _NOT_MADE),
    "reimage": JobKind(volumes, _download, _record_reimage, _record_failed_reimage),
    "upload": JobKind(
        volumes,
        _upload,
        _restore_status("uploading"),
        _restore_status("uploading"),
        abandon=_remove_image,
    ),
    "extend": JobKind(volumes, _grow, _record_extension, _record_failed_extension),
    "delete": JobKind(
        volumes,
        _remove("volume"),
        _delete_row(volumes),
        _record_failed_delete,
        removes=True,
    ),
    "snapshot": JobKind(
        snapshots,
        _copy,
        _set(snapshots, ("creating",), status="available", progress="100%"),
        _set(snapshots, ("creating",), status="error"),
    ),
    "delete-snapshot": JobKind(
        snapshots,
        _remove("snapshot"),
        _delete_row(snapshots),
        _set(snapshots, ("deleting",), status="error_deleting"),
        removes=True,
    ),
    # Attempts for about an hour without the compute service.
    "tell": JobKind(None, _send_events, _do_nothing, _do_nothing, attempts=70),
}
