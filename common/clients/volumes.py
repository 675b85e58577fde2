# SPDX-License-Identifier: Apache-2.0
"""The client of the block storage service (Cinder v3): volumes, snapshots and attachments.

The API reads volumes with the user's token, and creates the user's objects with that token. The
conductor attaches and detaches with Kilonova's own token. An *attachment* is a server's permission
to use a volume. Without a connector the attachment reserves the volume. With a connector, a host
may connect to the volume. A service that does not answer is Unavailable. A definite refusal is
another Problem with the service's message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from common.clients.http import Http, OptionalService, document, refusal_of
from common.domain import errors
from common.domain.json_types import JsonObject

NAME = "block storage service"
#: The first version in which an attachment can be completed.
VERSION = "3.44"
NEEDS = f"{VERSION} of its API, which volumes of servers need"
#: The first version in which a volume can be overwritten with an image.
REIMAGE_VERSION = "3.68"
NEEDS_REIMAGE = f"{REIMAGE_VERSION} of its API, which another image on a volume needs"
#: The optional end of an endpoint in a catalogue. Since 3.67 the project is not needed.
_VERSION_AND_PROJECT = re.compile("/v3(/[^/]*)?$")
#: Header that permits the detach of a volume in use, which users must not do (CVE-2023-2088).
AS_SERVICE = ("X-Service-Token",)
AVAILABLE, IN_USE, CREATING, ERROR = "available", "in-use", "creating", "error"
RESERVED, DOWNLOADING = "reserved", "downloading"
DELETING, ERROR_DELETING = "deleting", "error_deleting"
#: The progress of a snapshot at which the host is done and the service continues.
HOST_IS_DONE = "90%"
#: Migration status of a volume while servers copy its data to another volume.
MIGRATING = "migrating"


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume.

    Attributes:
        image_metadata: Metadata of the image from which the volume was created.
        servers: Ids of the servers to which the volume is attached.
        migration: Migration status. Empty if the token has no admin role.
    """

    id: str
    status: str
    size_gb: int
    bootable: bool = False
    multiattach: bool = False
    availability_zone: str | None = None
    volume_type: str | None = None
    image_metadata: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False
    encrypted: bool = False
    project_id: str | None = None
    servers: tuple[str, ...] = ()
    migration: str = ""


@dataclass(frozen=True, slots=True)
class VolumeSnapshot:
    """A snapshot: the data of a volume at one moment, from which volumes can be created."""

    id: str
    status: str
    size_gb: int
    volume_id: str
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class VolumeType:
    """A volume type that the token may use."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A server's permission to use a volume.

    Attributes:
        connection: The data that the host needs to connect (driver_volume_type and more). May
            contain passwords. Empty without a connector.
    """

    id: str
    volume_id: str
    server_id: str
    status: str
    connection: JsonObject = field(default_factory=dict, repr=False)


@dataclass
class VolumeClient(OptionalService):
    """The client of the block storage service. Thread-safe.

    Every call raises Unavailable if the cloud has no such service or if it does not answer,
    Unauthorized if the service does not accept the token, and NotFound, BadRequest, Forbidden,
    Conflict or TooLarge (a quota) for other refusals.
    """

    service_name, section = NAME, "volume"

    def __post_init__(self) -> None:
        self._http = Http(NAME, self._url, self.timeout)

    # --- volumes ---
    def volume(self, token: str, volume_id: str) -> Volume:
        """Return a volume.

        Raises:
            NotFound: The volume does not exist, or the token may not see it.
        """
        return _volume(self._json("GET", f"/volumes/{_quote(volume_id)}", token)["volume"])

    def snapshot(self, token: str, snapshot_id: str) -> VolumeSnapshot:
        """Return a snapshot.

        Raises:
            NotFound: The snapshot does not exist, or the token may not see it.
        """
        return _snapshot(self._json("GET", f"/snapshots/{_quote(snapshot_id)}", token)["snapshot"])

    def types(self, token: str) -> list[VolumeType]:
        """Return the volume types that the token may use."""
        types = self._json("GET", "/types", token)["volume_types"]
        return [VolumeType(str(entry["id"]), str(entry["name"])) for entry in types]

    def create(
        self,
        token: str,
        *,
        size_gb: int,
        name: str = "",
        image_id: str | None = None,
        snapshot_id: str | None = None,
        volume_type: str | None = None,
        zone: str | None = None,
    ) -> Volume:
        """Start to create a volume in the token's project, and return the volume.

        The volume is empty, or created from an image or a snapshot. The service continues after
        this call. The volume is ready when its status is ``available``. The status ``error`` is
        final.

        Raises:
            TooLarge: A quota of the service is exceeded.
        """
        values: JsonObject = {"size": size_gb, "name": name}
        optional = {
            "imageRef": image_id,
            "snapshot_id": snapshot_id,
            "volume_type": volume_type,
            "availability_zone": zone,
        }
        values |= {key: value for key, value in optional.items() if value}
        return _volume(self._json("POST", "/volumes", token, {"volume": values})["volume"])

    def delete(self, token: str, volume_id: str) -> None:
        """Start to delete a volume. A missing volume is no error.

        Raises:
            BadRequest: The volume's status does not permit this, for example ``in-use``, or the
                volume has snapshots.
        """
        self._send_ignoring_missing("DELETE", f"/volumes/{_quote(volume_id)}", token)

    def reimage(self, token: str, volume_id: str, image_id: str) -> None:
        """Start to overwrite a reserved volume with an image.

        The service continues after this call. The status of the volume is ``downloading``
        meanwhile, and then ``reserved`` again or ``error``.

        Raises:
            BadRequest: The volume is not reserved, or is too small.
            Conflict: The service is too old.
        """
        body = {"os-reimage": {"image_id": image_id, "reimage_reserved": True}}
        path = f"/volumes/{_quote(volume_id)}/action"
        self._json("POST", path, token, body, version=REIMAGE_VERSION)

    # --- snapshots ---
    def make_snapshot(self, token: str, volume_id: str, name: str) -> VolumeSnapshot:
        """Start to create a snapshot of a volume, even of a volume in use, and return the snapshot.

        The service continues after this call. The snapshot is ready when its status is
        ``available``. The status ``error`` is final.

        Raises:
            TooLarge: A quota of the service is exceeded.
        """
        values = {"volume_id": volume_id, "name": name, "force": True}
        return _snapshot(self._json("POST", "/snapshots", token, {"snapshot": values})["snapshot"])

    def delete_snapshot(self, token: str, snapshot_id: str) -> None:
        """Start to delete a snapshot. A snapshot that is missing or being deleted is no error.

        Raises:
            BadRequest: The snapshot's status does not permit this, for example ``creating``.
        """
        try:
            self._send_ignoring_missing("DELETE", f"/snapshots/{_quote(snapshot_id)}", token)
        except errors.BadRequest:
            if not self._is_being_deleted(token, snapshot_id):
                raise

    def update_snapshot_status(self, token: str, snapshot_id: str, status: str) -> None:
        """Report to the service the result of a host that creates or deletes a snapshot.

        Args:
            token: Kilonova's own token.
            snapshot_id: The snapshot's id.
            status: The snapshot's present status (``creating`` or ``deleting``) reports success,
                and the service then completes the snapshot. ``error`` or ``error_deleting`` reports
                a failure.

        Raises:
            BadRequest: The service does not wait for this report.
        """
        values = {"status": status, "progress": HOST_IS_DONE}
        path = f"/snapshots/{_quote(snapshot_id)}/action"
        self._json("POST", path, token, {"os-update_snapshot_status": values})

    def _is_being_deleted(self, token: str, snapshot_id: str) -> bool:
        try:
            return self.snapshot(token, snapshot_id).status == DELETING
        except errors.NotFound:
            return True

    def end_migration(
        self, token: str, volume_id: str, new_volume_id: str, failed: bool = False
    ) -> str:
        """Complete or cancel the migration of a volume, after its data was copied to a new volume.

        The service deletes the volume that is no longer needed.

        Args:
            token: Kilonova's own token.
            volume_id: The volume that is migrated.
            new_volume_id: The volume with the copy.
            failed: True cancels the migration, which keeps the old data.

        Returns:
            The id of the remaining volume.

        Raises:
            BadRequest: The volume is not being migrated to the new volume.
        """
        values: JsonObject = {"new_volume": new_volume_id, "error": failed}
        path = f"/volumes/{_quote(volume_id)}/action"
        answer = self._json("POST", path, token, {"os-migrate_volume_completion": values})
        return str(answer["save_volume_id"])

    # --- records for users, with "volumes" or "snapshots" as ``resource`` ---
    def records(self, token: str, resource: str) -> list[JsonObject]:
        """Return all volumes or snapshots of the token's project in Cinder's format, newest first.

        ``resource`` is "volumes" or "snapshots". All pages are read.
        """
        records: list[JsonObject] = []
        path = f"/{resource}/detail"
        while True:
            page = self._json("GET", path, token)
            records += page[resource]
            links = {link["rel"] for link in page.get(f"{resource}_links") or ()}
            if "next" not in links or not page[resource]:
                return records
            path = f"/{resource}/detail?{urlencode({'marker': records[-1]['id']})}"

    def record(self, token: str, resource: str, record_id: str) -> JsonObject:
        """Return a volume or snapshot in Cinder's format.

        ``resource`` is "volumes" or "snapshots".

        Raises:
            NotFound: The record does not exist, or the token may not see it.
        """
        return dict(self._json("GET", f"/{resource}/{_quote(record_id)}", token)[resource[:-1]])

    def make(self, token: str, resource: str, values: JsonObject) -> JsonObject:
        """Start to create a volume or snapshot in the token's project, and return the record.

        ``resource`` is "volumes" or "snapshots". ``values`` and the record have Cinder's format.

        Raises:
            TooLarge: A quota of the service is exceeded.
        """
        return dict(
            self._json("POST", f"/{resource}", token, {resource[:-1]: values})[resource[:-1]]
        )

    def remove(self, token: str, resource: str, record_id: str) -> None:
        """Start to delete a volume or snapshot. ``resource`` is "volumes" or "snapshots".

        Raises:
            NotFound: The volume or snapshot does not exist.
            BadRequest: The status of the volume or snapshot does not permit this.
        """
        self._json("DELETE", f"/{resource}/{_quote(record_id)}", token)

    # --- attachments ---
    def attachments(
        self, token: str, server_id: str, volume_id: str | None = None
    ) -> list[Attachment]:
        """Return the attachments of a server with their connections, or only those of one volume.

        With an admin's token, all projects are searched.
        """
        query = {"instance_id": server_id, "all_tenants": "1"}
        if volume_id:
            query["volume_id"] = volume_id
        attachments = self._json("GET", f"/attachments/detail?{urlencode(query)}", token)[
            "attachments"
        ]
        return [_attachment(attachment) for attachment in attachments]

    def every_attachment(self, token: str) -> list[Attachment]:
        """Return the attachments of all servers, without connections. Needs an admin's token.

        All pages are read, up to an empty page. Why: Cinder sends no links to further pages here.
        """
        attachments: dict[str, Attachment] = {}
        query = {"all_tenants": "1"}
        while True:
            answer = self._json("GET", f"/attachments?{urlencode(query)}", token)
            page = [_attachment(attachment) for attachment in answer["attachments"]]
            if attachments.keys() >= {attachment.id for attachment in page}:
                return list(attachments.values())
            attachments |= {attachment.id: attachment for attachment in page}
            query["marker"] = page[-1].id

    def attachment(self, token: str, attachment_id: str) -> Attachment:
        """Return an attachment with its connection.

        Raises:
            NotFound: The attachment does not exist.
        """
        answer = self._json("GET", f"/attachments/{_quote(attachment_id)}", token)
        return _attachment(answer["attachment"])

    def attach(
        self,
        token: str,
        volume_id: str,
        server_id: str,
        connector: JsonObject | None = None,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        """Create an attachment of a volume to a server.

        Args:
            token: The token of the user, or Kilonova's own token.
            volume_id: The volume's id.
            server_id: The server's id.
            connector: The host that may connect. None: the volume is only reserved for the server.
            mountpoint: The device name in the guest, for the service's records. Ignored without
                ``connector``.
            mode: "rw" or "ro". None: the service decides. Ignored without ``connector``.

        Raises:
            NotFound: The volume does not exist.
            BadRequest: Another server has the volume, or its status does not permit an attachment.
        """
        values: JsonObject = {"volume_uuid": volume_id, "instance_uuid": server_id}
        values["connector"] = _connector(connector, mountpoint, mode)
        return _attachment(
            self._json("POST", "/attachments", token, {"attachment": values})["attachment"]
        )

    def connect(
        self,
        token: str,
        attachment_id: str,
        connector: JsonObject,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        """Let a host connect to the volume, and return the attachment with the connection's data.

        ``connector`` describes the host. The other arguments are those of ``attach``.

        Raises:
            NotFound: The attachment does not exist.
        """
        values = {"connector": _connector(connector, mountpoint, mode)}
        answer = self._json(
            "PUT", f"/attachments/{_quote(attachment_id)}", token, {"attachment": values}
        )
        return _attachment(answer["attachment"])

    def complete(self, token: str, attachment_id: str) -> None:
        """Complete an attachment: the service marks the volume as in use by the server.

        Raises:
            NotFound: The attachment does not exist.
        """
        path = f"/attachments/{_quote(attachment_id)}/action"
        self._json("POST", path, token, {"os-complete": None})

    def detach(self, token: str, attachment_id: str) -> None:
        """Delete an attachment with its connection. A missing attachment is no error.

        Call this only after the host has disconnected.
        """
        self._send_ignoring_missing(
            "DELETE", f"/attachments/{_quote(attachment_id)}", token, AS_SERVICE
        )

    # --- HTTP ---
    def _url(self) -> str:
        return _VERSION_AND_PROJECT.sub("", self._base()) + "/v3"

    def _send_ignoring_missing(
        self,
        method: str,
        path: str,
        token: str,
        beside: Iterable[str] = (),
    ) -> None:
        try:
            self._json(method, path, token, beside=beside)
        except errors.NotFound:
            return

    def _json(
        self,
        method: str,
        path: str,
        token: str,
        body: JsonObject | None = None,
        beside: Iterable[str] = (),
        version: str = VERSION,
    ) -> JsonObject:
        """Send a request and return the JSON object in the response.

        Args:
            method: The HTTP method.
            path: The path below /v3, with the query.
            token: The token for X-Auth-Token.
            body: The JSON object to send, or None.
            beside: Names of further headers that contain the token.
            version: The microversion.

        Raises:
            Problem: The service does not answer, or refuses the request.
        """
        more: JsonObject = {} if body is None else {"json": body}
        answer = self._http.send(
            method,
            self._http.base() + path,
            token,
            headers={"OpenStack-API-Version": f"volume {version}"} | dict.fromkeys(beside, token),
            **more,
        )
        if answer.status_code >= 300:
            raise refusal_of(answer, NAME, NEEDS if version == VERSION else NEEDS_REIMAGE)
        return document(answer, NAME)


def _quote(name: str) -> str:
    return quote(name, safe="")


def _connector(
    connector: JsonObject | None, mountpoint: str | None, mode: str | None
) -> JsonObject | None:
    """Return the connector with mountpoint and mode, if given, or None without a connector."""
    if connector is None:
        return None
    optional = {"mountpoint": mountpoint, "mode": mode}
    return connector | {name: value for name, value in optional.items() if value}


def _volume(record: JsonObject) -> Volume:
    metadata = record.get("metadata") or {}
    return Volume(
        id=str(record["id"]),
        status=str(record["status"]),
        size_gb=int(record["size"]),
        bootable=_is_true(record.get("bootable")),
        multiattach=_is_true(record.get("multiattach")),
        availability_zone=record.get("availability_zone"),
        volume_type=record.get("volume_type"),
        image_metadata={
            str(name): str(value)
            for name, value in (record.get("volume_image_metadata") or {}).items()
        },
        read_only=_is_true(metadata.get("readonly")),
        encrypted=_is_true(record.get("encrypted")),
        project_id=record.get("os-vol-tenant-attr:tenant_id"),
        servers=tuple(
            str(attachment["server_id"]) for attachment in record.get("attachments") or ()
        ),
        migration=str(record.get("migration_status") or ""),
    )


def _snapshot(record: JsonObject) -> VolumeSnapshot:
    return VolumeSnapshot(
        str(record["id"]),
        str(record["status"]),
        int(record["size"]),
        str(record["volume_id"]),
        record.get("os-extended-snapshot-attributes:project_id"),
    )


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"


def _attachment(record: JsonObject) -> Attachment:
    return Attachment(
        id=str(record["id"]),
        volume_id=str(record["volume_id"]),
        server_id=str(record.get("instance") or ""),
        status=str(record["status"]),
        connection=dict(record.get("connection_info") or {}),
    )
