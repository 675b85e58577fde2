# SPDX-License-Identifier: Apache-2.0
"""The block storage service (Cinder v3), over HTTP only: volumes, and which server may have them.

The API looks at volumes with the user's token, and makes with it what is to be the user's; the
conductor attaches and detaches with Kilonova's own. An *attachment* is the permission: without a
connector it reserves a volume for a server, with one it lets a host connect. A service that does
not answer is Unavailable; what it refuses for good is another Problem, in the service's own words.
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
REIMAGE_VERSION = "3.68"  #: the first in which a volume can be written anew
NEEDS_REIMAGE = f"{REIMAGE_VERSION} of its API, which another image on a volume needs"
#: How an endpoint in a catalogue may end; a service that knows 3.67 asks for no project there.
_VERSION_AND_PROJECT = re.compile("/v3(/[^/]*)?$")
#: A user may not end the connection of a server beneath it; who shows this may (CVE-2023-2088).
AS_SERVICE = ("X-Service-Token",)
AVAILABLE, IN_USE, CREATING, ERROR = "available", "in-use", "creating", "error"
RESERVED, DOWNLOADING = "reserved", "downloading"
DELETING, ERROR_DELETING = "deleting", "error_deleting"
#: The progress of a snapshot with which the service takes over again.
HOST_IS_DONE = "90%"
#: A volume whose data the service has its servers copy into another one.
MIGRATING = "migrating"


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume as the service has it. image_metadata: of the image that it was made of; servers:
    that it is attached to; migration: how far its migration is, for admins alone."""

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
    """What a volume was like once; another one can be made of it."""

    id: str
    status: str
    size_gb: int
    volume_id: str
    project_id: str | None = None


@dataclass(frozen=True, slots=True)
class VolumeType:
    """A kind of volume that the token may ask for."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A server's permission to have a volume. connection: what the host needs in order to connect
    (driver_volume_type and the rest), which may hold passwords; empty without a connector."""

    id: str
    volume_id: str
    server_id: str
    status: str
    connection: JsonObject = field(default_factory=dict, repr=False)


@dataclass
class VolumeClient(OptionalService):
    """One process's way to the service. Thread-safe.

    Every call raises Unauthorized for a token that the service does not accept, and NotFound,
    BadRequest, Forbidden, Conflict and TooLarge (a quota) for what it refuses.
    """

    service_name, section = NAME, "volume"

    def __post_init__(self) -> None:
        self._http = Http(NAME, self._url, self.timeout)

    # --- volumes ---
    def volume(self, token: str, volume_id: str) -> Volume:
        """One volume. Raises NotFound: there is none that the token may see."""
        return _volume(self._json("GET", f"/volumes/{_part(volume_id)}", token)["volume"])

    def snapshot(self, token: str, snapshot_id: str) -> VolumeSnapshot:
        """One snapshot. Raises NotFound: there is none that the token may see."""
        return _snapshot(self._json("GET", f"/snapshots/{_part(snapshot_id)}", token)["snapshot"])

    def types(self, token: str) -> list[VolumeType]:
        """Those that the token may ask for."""
        found = self._json("GET", "/types", token)["volume_types"]
        return [VolumeType(str(one["id"]), str(one["name"])) for one in found]

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
        """A new volume of the token's project, empty or made of an image or a snapshot. It is there
        when its status is ``available``, and never will be when that is ``error``.

        Raises:
            TooLarge: a quota of the service does not allow it.
        """
        wanted: JsonObject = {"size": size_gb, "name": name}
        beside = {
            "imageRef": image_id,
            "snapshot_id": snapshot_id,
            "volume_type": volume_type,
            "availability_zone": zone,
        }
        wanted |= {key: value for key, value in beside.items() if value}
        return _volume(self._json("POST", "/volumes", token, {"volume": wanted})["volume"])

    def delete(self, token: str, volume_id: str) -> None:
        """Delete a volume; one that is gone is fine.

        Raises:
            BadRequest: it is attached, or has snapshots.
        """
        self._gone_is_fine("DELETE", f"/volumes/{_part(volume_id)}", token)

    def reimage(self, token: str, volume_id: str, image_id: str) -> None:
        """Have a volume that is reserved written anew from an image: it is ``downloading``, and
        then reserved as before, or in ``error``.

        Raises:
            BadRequest: it is not reserved, or too small. Conflict: the service is too old.
        """
        wanted = {"os-reimage": {"image_id": image_id, "reimage_reserved": True}}
        path = f"/volumes/{_part(volume_id)}/action"
        self._json("POST", path, token, wanted, version=REIMAGE_VERSION)

    # --- snapshots ---
    def make_snapshot(self, token: str, volume_id: str, name: str) -> VolumeSnapshot:
        """A new snapshot, of the token's project, also of a volume that is in use. It is taken when
        its status is ``available``, and never will be when that is ``error``.

        Raises:
            TooLarge: a quota of the service does not allow it.
        """
        wanted = {"volume_id": volume_id, "name": name, "force": True}
        return _snapshot(self._json("POST", "/snapshots", token, {"snapshot": wanted})["snapshot"])

    def delete_snapshot(self, token: str, snapshot_id: str) -> None:
        """Delete a snapshot; one that is gone, or going, is fine.

        Raises:
            BadRequest: it is being made.
        """
        try:
            self._gone_is_fine("DELETE", f"/snapshots/{_part(snapshot_id)}", token)
        except errors.BadRequest:
            if not self._is_going(token, snapshot_id):
                raise

    def update_snapshot_status(self, token: str, snapshot_id: str, status: str) -> None:
        """What a host that takes or deletes the snapshot has made of it: the status as it is
        (``creating``, ``deleting``) says that the host is done, and the service goes on.

        Raises:
            BadRequest: the service does not wait for it, or not for this.
        """
        wanted = {"status": status, "progress": HOST_IS_DONE}
        path = f"/snapshots/{_part(snapshot_id)}/action"
        self._json("POST", path, token, {"os-update_snapshot_status": wanted})

    def _is_going(self, token: str, snapshot_id: str) -> bool:
        try:
            return self.snapshot(token, snapshot_id).status == DELETING
        except errors.NotFound:
            return True

    def end_migration(
        self, token: str, volume_id: str, new_volume_id: str, failed: bool = False
    ) -> str:
        """The server has the data of a migrating volume in the new one, or does not have it there;
        the other one is deleted. Returns the id that the volume has from now on.

        Raises:
            BadRequest: it is not being migrated there.
        """
        wanted: JsonObject = {"new_volume": new_volume_id, "error": failed}
        path = f"/volumes/{_part(volume_id)}/action"
        found = self._json("POST", path, token, {"os-migrate_volume_completion": wanted})
        return str(found["save_volume_id"])

    # --- what users see there: "volumes" or "snapshots", as the service has them ---
    def records(self, token: str, resource: str) -> list[JsonObject]:
        """All of the token's project, the newest first, of as many pages as there are."""
        found: list[JsonObject] = []
        path = f"/{resource}/detail"
        while True:
            said = self._json("GET", path, token)
            found += said[resource]
            links = {link["rel"] for link in said.get(f"{resource}_links") or ()}
            if "next" not in links or not said[resource]:
                return found
            path = f"/{resource}/detail?{urlencode({'marker': found[-1]['id']})}"

    def record(self, token: str, resource: str, record_id: str) -> JsonObject:
        """One. Raises NotFound: there is none that the token may see."""
        return dict(self._json("GET", f"/{resource}/{_part(record_id)}", token)[resource[:-1]])

    def make(self, token: str, resource: str, values: JsonObject) -> JsonObject:
        """A new one of the token's project. Raises TooLarge: a quota does not allow it."""
        return dict(
            self._json("POST", f"/{resource}", token, {resource[:-1]: values})[resource[:-1]]
        )

    def remove(self, token: str, resource: str, record_id: str) -> None:
        """Delete one. Raises NotFound: it is gone already."""
        self._json("DELETE", f"/{resource}/{_part(record_id)}", token)

    # --- attachments ---
    def attachments(
        self, token: str, server_id: str, volume_id: str | None = None
    ) -> list[Attachment]:
        """A server's, or those that it has of one volume, with their connections; in all projects
        for an admin's token."""
        asked = {"instance_id": server_id, "all_tenants": "1"}
        if volume_id:
            asked["volume_id"] = volume_id
        found = self._json("GET", f"/attachments/detail?{urlencode(asked)}", token)["attachments"]
        return [_attachment(one) for one in found]

    def every_attachment(self, token: str) -> list[Attachment]:
        """Those of all servers in all projects, for an admin's token; without connections."""
        found = self._json("GET", "/attachments?all_tenants=1", token)["attachments"]
        return [_attachment(one) for one in found]

    def attachment(self, token: str, attachment_id: str) -> Attachment:
        """One. Raises NotFound."""
        found = self._json("GET", f"/attachments/{_part(attachment_id)}", token)
        return _attachment(found["attachment"])

    def attach(
        self,
        token: str,
        volume_id: str,
        server_id: str,
        connector: JsonObject | None = None,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        """A new attachment: without a ``connector`` the volume is reserved for the server, with one
        the host that it tells of may connect.

        Raises:
            NotFound: there is no such volume. BadRequest: it is another server's, or not available.
        """
        wanted: JsonObject = {"volume_uuid": volume_id, "instance_uuid": server_id}
        wanted["connector"] = _connector(connector, mountpoint, mode)
        return _attachment(
            self._json("POST", "/attachments", token, {"attachment": wanted})["attachment"]
        )

    def connect(
        self,
        token: str,
        attachment_id: str,
        connector: JsonObject,
        mountpoint: str | None = None,
        mode: str | None = None,
    ) -> Attachment:
        """Let the host that the ``connector`` tells of connect. Raises NotFound: there is no such
        attachment."""
        wanted = {"connector": _connector(connector, mountpoint, mode)}
        found = self._json(
            "PUT", f"/attachments/{_part(attachment_id)}", token, {"attachment": wanted}
        )
        return _attachment(found["attachment"])

    def complete(self, token: str, attachment_id: str) -> None:
        """The server has the volume: it is shown as in-use. Raises NotFound: there is no such
        attachment."""
        path = f"/attachments/{_part(attachment_id)}/action"
        self._json("POST", path, token, {"os-complete": None})

    def detach(self, token: str, attachment_id: str) -> None:
        """End an attachment with its connection, when the host has let go; one that is gone is
        fine."""
        self._gone_is_fine("DELETE", f"/attachments/{_part(attachment_id)}", token, AS_SERVICE)

    # --- HTTP ---
    def _url(self) -> str:
        return _VERSION_AND_PROJECT.sub("", self._base()) + "/v3"

    def _gone_is_fine(
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
        """``beside``: names of headers that carry the token, too."""
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


def _part(name: str) -> str:
    """A name within a path."""
    return quote(name, safe="")


def _connector(
    connector: JsonObject | None, mountpoint: str | None, mode: str | None
) -> JsonObject | None:
    """With what is said of one attachment alone."""
    if connector is None:
        return None
    beside = {"mountpoint": mountpoint, "mode": mode}
    return connector | {name: value for name, value in beside.items() if value}


def _volume(found: JsonObject) -> Volume:
    metadata = found.get("metadata") or {}
    return Volume(
        id=str(found["id"]),
        status=str(found["status"]),
        size_gb=int(found["size"]),
        bootable=_is_true(found.get("bootable")),
        multiattach=_is_true(found.get("multiattach")),
        availability_zone=found.get("availability_zone"),
        volume_type=found.get("volume_type"),
        image_metadata={
            str(name): str(value)
            for name, value in (found.get("volume_image_metadata") or {}).items()
        },
        read_only=_is_true(metadata.get("readonly")),
        encrypted=_is_true(found.get("encrypted")),
        project_id=found.get("os-vol-tenant-attr:tenant_id"),
        servers=tuple(str(one["server_id"]) for one in found.get("attachments") or ()),
        migration=str(found.get("migration_status") or ""),
    )


def _snapshot(found: JsonObject) -> VolumeSnapshot:
    return VolumeSnapshot(
        str(found["id"]),
        str(found["status"]),
        int(found["size"]),
        str(found["volume_id"]),
        found.get("os-extended-snapshot-attributes:project_id"),
    )


def _is_true(said: object) -> bool:
    return str(said).lower() == "true"


def _attachment(found: JsonObject) -> Attachment:
    return Attachment(
        id=str(found["id"]),
        volume_id=str(found["volume_id"]),
        server_id=str(found.get("instance") or ""),
        status=str(found["status"]),
        connection=dict(found.get("connection_info") or {}),
    )
