# SPDX-License-Identifier: Apache-2.0
"""The service object of the resources, and writing transactions.

A `VolumeChange` may add jobs. A job is committed together with the reason, and the worker is woken
after the commit.
"""

import socket
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from sqlalchemy import ColumnElement, Connection, Table, func, insert, select, update

from deploy.one_machine.services.database import Database, DbRow, DbValues
from deploy.one_machine.services.json_types import Body, JsonValue
from deploy.one_machine.services.resource import Transaction
from deploy.one_machine.services.volume import schema
from deploy.one_machine.services.volume.exports import Export, Exports
from deploy.one_machine.services.volume.faults import fault
from deploy.one_machine.services.volume.files import VolumeFiles

DEFAULT_TYPE = "__DEFAULT__"


def moment() -> str:
    """Return the present time in the format of the API (UTC, with microseconds)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")


@dataclass(frozen=True)
class VolumeSettings:
    """Settings from the command line."""

    zone: str = "nova"
    #: Servers on the host with this name open the volumes' files.
    host: str = field(default_factory=socket.gethostname)
    #: Other names of this machine in connectors, for a cloud with several hosts on one machine.
    more_hosts: frozenset[str] = frozenset()
    max_image_gigabytes: int = 100
    #: How long a connection waits for a running copy of the volume.
    wait_seconds: float = 30.0


class ImageSource(Protocol):
    """The image service, as the volume service uses it."""

    def show(self, key: str, token: str) -> Body | None:
        """Return the image, or None if it does not exist for the user of the token.

        Args:
            key: The id of the image.
            token: The user's token.

        Raises:
            Fault: 503, the image service cannot answer now.
        """

    def create(self, body: DbValues, token: str) -> Body:
        """Create an image without data, and return the image.

        Args:
            body: The attributes of the image, as in Glance's API.
            token: The user's token.

        Raises:
            Fault: 400 or 403, the image service refuses. 503, the image service cannot answer now.
        """

    def download(self, key: str, path: Path, limit: int, check: Callable[[], None]) -> None:
        """Write the image's data into a new file.

        Args:
            key: The id of the image.
            path: The path of the new file.
            limit: The largest permitted size in bytes.
            check: Raises when the download should stop.

        Raises:
            ImageRefused: The image cannot be read, or is larger than the limit.
            Later: The image service cannot answer now, or the download broke off.
        """

    def upload(self, key: str, path: Path, check: Callable[[], None]) -> bool:
        """Upload an image's data.

        Args:
            key: The id of the image.
            path: The path of the file with the data.
            check: Raises when the upload should stop.

        Returns:
            True if the image has data now, also those of an earlier upload. False if the image
            service refuses the data for good, for example because the image was deleted.

        Raises:
            Later: The image service cannot answer now, or an earlier upload has not ended.
        """

    def remove_unfinished(self, key: str) -> None:
        """Delete an image that has no data. An image with data or without a row stays as it is.

        A failure is only logged.

        Args:
            key: The id of the image.
        """


class ComputeSource(Protocol):
    """The compute service, as the volume service uses it."""

    def attachment_of(self, server: str, volume: str) -> str | None:
        """Return the id of the attachment through which a server uses a volume.

        The result is "" if the attachment has no id, and None if the server does not use the volume
        or there is no compute service.

        Args:
            server: The id of the server.
            volume: The id of the volume.

        Raises:
            Fault: 503, the compute service or the identity service cannot answer now.
        """

    def notify(self, events: Collection[Mapping[str, str]]) -> bool:
        """Send events to the compute service.

        Args:
            events: The events, as in Nova's API os-server-external-events.

        Returns:
            False if the events must be sent again later. True if the compute service accepted them
            or refuses them for good, or if there is no compute service.
        """


class VolumeService:
    """The database, the files, the settings and the clients of other services."""

    def __init__(
        self,
        database: Database,
        files: VolumeFiles,
        images: ImageSource,
        compute: ComputeSource,
        exports: Exports,
        settings: VolumeSettings | None = None,
    ) -> None:
        self.database, self.files = database, files
        self.images, self.compute, self.exports = images, compute, exports
        self.settings = settings or VolumeSettings()
        self.has_jobs = threading.Event()
        """Set when there may be jobs for the worker."""
        with database.write() as connection:
            if connection.execute(select(schema.types.c.id).limit(1)).first() is None:
                connection.execute(
                    insert(schema.types).values(
                        id=str(uuid.uuid4()),
                        name=DEFAULT_TYPE,
                        description="Default Volume Type",
                        created_at=moment(),
                    )
                )

    @property
    def backend(self) -> str:
        """The host, backend and pool in Cinder's notation, ``HOST@files#files``."""
        return f"{self.settings.host}@files#files"

    @contextmanager
    def change(self) -> Iterator["VolumeChange"]:
        """Yield a writing transaction. If it added jobs, wake the worker after the commit."""
        with self.database.write() as connection:
            change = VolumeChange(connection)
            yield change
        if change.has_jobs:
            self.has_jobs.set()

    def settle(self, change: "VolumeChange") -> None:
        """Do nothing, because clients do not wait for a change's effects."""

    def connection_info(
        self, change: "VolumeChange", volume: DbRow, attachment: DbRow, host: str, mode: str
    ) -> Body:
        """Return the connection of a host to a volume, in the format of os-brick's connectors.

        For this service's own host the connection has the path of the volume's file. For another
        host the connection has an address and a port, and the caller then starts the export there
        with ``open_export``. This function changes no rows.

        Args:
            change: The transaction.
            volume: The volume's row.
            attachment: The attachment's row.
            host: The name of the host.
            mode: "rw" or "ro".

        Raises:
            Fault: 400, the service exports no volumes to other hosts. 409, the volume has no file.
                503, no port is free.
        """
        path = self.files.path("volume", volume.id)
        if not path.exists():
            raise fault("Conflict", why=f"volume {volume.id} has no file: delete the volume")
        connection = (
            {"driver_volume_type": "local", "device_path": str(path)}
            if host in {self.settings.host, *self.settings.more_hosts}
            else self._nbd_connection(change, volume.id, attachment.id)
        )
        return connection | {
            "format": "raw",
            "volume_id": volume.id,
            "attachment_id": attachment.id,
            "access_mode": mode,
            "discard": True,
            "encrypted": False,
            "cacheable": False,
            "enforce_multipath": False,
            "qos_specs": None,
        }

    def _nbd_connection(self, change: "VolumeChange", volume_id: str, key: str) -> Body:
        if not self.exports.address:
            why = f"Volume {volume_id} is on host {self.settings.host}, which exports no volumes to other hosts."
            raise fault("InvalidInput", why=why)
        connections = {row.id: row.connection_info for row in _find_exported(change.connection)}
        port = connections.get(key, {}).get("port") or self.exports.free_port(
            info["port"] for info in connections.values()
        )
        if port is None:
            raise fault("Unavailable", why=f"No port is free to export volume {volume_id}.")
        return {
            "driver_volume_type": "nbd",
            "host": self.exports.address,
            "port": port,
            "export": volume_id,
            "tls": bool(self.exports.tls),
        }

    def open_export(self, key: str) -> None:
        """Start the export of a volume if the attachment's connection needs one.

        Args:
            key: The id of the attachment.

        Raises:
            Fault: 503, the export cannot start. The attachment is then reserved, without a
                connection. The caller updates the volume's status.
        """
        with self.exports.lock:
            with self.database.read() as connection:
                exports = self._expected_exports(connection)
            if key not in exports or self.exports.start(exports[key]):
                return
            with self.change() as change:
                no_connection: Body = {
                    "connection_info": {},
                    "status": "reserved",
                    "host": None,
                }
                change.set(schema.attachments, key, no_connection)
        why = f"The export for attachment {key} did not start; see the log of the volume service."
        raise fault("Unavailable", why=why)

    def settle_exports(self) -> None:
        """Start the missing exports of attachments with an NBD connection, and end all others.

        A failed start is logged.
        """
        with self.exports.lock:
            with self.database.read() as connection:
                exports = self._expected_exports(connection)
            self.exports.settle(exports)

    def _expected_exports(self, connection: Connection) -> dict[str, Export]:
        return {
            row.id: Export(
                row.id,
                row.volume_id,
                self.files.path("volume", row.volume_id),
                row.connection_info["port"],
                row.mode == "ro",
            )
            for row in _find_exported(connection)
        }


def _find_exported(connection: Connection) -> list[DbRow]:
    rows = connection.execute(select(schema.attachments))
    return [row for row in rows if row.connection_info.get("driver_volume_type") == "nbd"]


@dataclass
class VolumeChange(Transaction):
    """An open transaction, which may add jobs."""

    has_jobs: bool = False

    def add(self, table: Table, values: DbValues) -> str:
        """Insert a row with the present time as created_at, and return its id.

        The id is that in ``values``, or else a random UUID.
        """
        key = str(values.get("id") or uuid.uuid4())
        self.connection.execute(
            insert(table).values({"created_at": moment()} | dict(values) | {"id": key})
        )
        return key

    def set(self, table: Table, key: str, values: DbValues, *rules: ColumnElement[bool]) -> bool:
        """Change columns of a row, and set the time of the update.

        Returns:
            False if the row does not exist or does not meet the rules. Then nothing changes.
        """
        result = self.connection.execute(
            update(table)
            .where(table.c.id == key, *rules)
            .values(dict(values) | {"updated_at": moment()})
        )
        return result.rowcount == 1

    def order(
        self, kind: str, target: str, source: str | None = None, **arguments: JsonValue
    ) -> None:
        """Insert a job, which the worker runs after the commit.

        Args:
            kind: A key of ``jobs.KINDS``.
            target: The id of the volume or snapshot that the job changes, or another text for a
                kind without a table. Jobs with the same target run one after another.
            source: The id of the volume or snapshot that the job reads, or None.
            arguments: More arguments of the kind.
        """
        self.has_jobs = True
        self.connection.execute(
            insert(schema.jobs).values(
                kind=kind, target_id=target, source_id=source, arguments=arguments
            )
        )


def is_read(connection: Connection, key: str) -> bool:
    """Return True if a job, running or waiting, reads this volume or snapshot."""
    query = select(schema.jobs.c.id).where(schema.jobs.c.source_id == key).limit(1)
    return connection.execute(query).first() is not None


def find_connected(connection: Connection, volume_id: str) -> list[DbRow]:
    """Return the attachments with a connection, through which a host may write to the volume."""
    rows = connection.execute(
        select(schema.attachments).where(schema.attachments.c.volume_id == volume_id)
    )
    return [row for row in rows if row.connection_info]


def default_type(connection: Connection) -> str:
    """Return the id of the type that new volumes without a requested type get."""
    is_default = schema.types.c.name == DEFAULT_TYPE
    return str(connection.execute(select(schema.types.c.id).where(is_default)).scalar_one())


def count(connection: Connection, table: Table, *rules: ColumnElement[bool]) -> int:
    """Return the number of rows that meet the rules."""
    return int(
        connection.execute(select(func.count()).select_from(table).where(*rules)).scalar_one()
    )
