# SPDX-License-Identifier: Apache-2.0
"""/v3/volume-transfers (3.55) and /v3/os-volume-transfer: a volume goes to another project.

Whoever knows the key accepts it, once: the key is told when the transfer is made, and only a hash
of it is kept.
"""

import hashlib
import hmac
import secrets

import falcon
from sqlalchemy import Connection, select, update

from deploy.standalone.database import DbRow
from deploy.standalone.resource import Body
from deploy.standalone.schemas import TRUTH, BodySchema, mapping, nullable, text
from deploy.standalone.volume import quotas
from deploy.standalone.volume.attachments import find_volume
from deploy.standalone.volume.caller import VolumeCaller
from deploy.standalone.volume.faults import fault
from deploy.standalone.volume.listing import listed
from deploy.standalone.volume.schema import snapshots, transfers, types, volumes
from deploy.standalone.volume.service import VolumeChange, VolumeService, is_read, may_use, moment
from deploy.standalone.volume.versions import links, require, since
from deploy.standalone.web import answer, read_object

NEW = {"volume_id": text(64), "name": nullable(text())}
CREATE = BodySchema(mapping(NEW, "volume_id"))
CREATE_WITH_SNAPSHOTS = BodySchema(mapping(NEW | {"no_snapshots": TRUTH}, "volume_id"))
ACCEPT = BodySchema(mapping({"auth_key": text()}, "auth_key"))
FILTERS = dict.fromkeys(("id", "name", "volume_id"))


class VolumeTransfers:
    """GET and POST of transfers; GET .../detail; GET and DELETE of one; POST .../accept. `minor`:
    since when the path exists."""

    def __init__(self, service: VolumeService, minor: int) -> None:
        self._service, self._minor = service, minor

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req, self._minor)
        rows, beside = listed(self._service, req, transfers, FILTERS, "transfers")
        answer(resp, {"transfers": [_brief(req, row) for row in rows]} | beside)

    def on_get_detail(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req, self._minor)
        rows, beside = listed(self._service, req, transfers, FILTERS, "transfers")
        answer(resp, {"transfers": [_detail(req, row) for row in rows]} | beside)

    def on_get_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req, self._minor)
        with self._service.database.read() as connection:
            answer(resp, {"transfer": _detail(req, _own(connection, req.context.caller, key))})

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        require(req, self._minor)
        caller: VolumeCaller = req.context.caller
        form = CREATE_WITH_SNAPSHOTS if since(req, 55) else CREATE
        body: Body = form.checked(read_object(req, "transfer"), "transfer")
        key, salt = secrets.token_hex(8), secrets.token_hex(8)
        with self._service.change() as change:
            volume = find_volume(change.connection, caller, body["volume_id"])
            caller.require_member("volume:create_transfer")
            rule = volumes.c.status == "available"
            if is_read(change.connection, volume.id) or not change.set(
                volumes, volume.id, {"status": "awaiting-transfer"}, rule
            ):
                raise fault("InvalidVolume", why="status must be available")
            made = change.add(
                transfers,
                {
                    "volume_id": volume.id,
                    "project_id": volume.project_id,
                    "name": body.get("name"),
                    "salt": salt,
                    "key_hash": _hash(salt, key),
                    "no_snapshots": bool(body.get("no_snapshots")),
                },
            )
            row = _own(change.connection, caller, made)
        resp.status = falcon.HTTP_202
        answer(resp, {"transfer": _detail(req, row) | {"auth_key": key}})

    def on_delete_one(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req, self._minor)
        caller: VolumeCaller = req.context.caller
        with self._service.change() as change:
            row = _own(change.connection, caller, key)
            caller.require_member("volume:delete_transfer")
            change.remove(transfers, key)
            rule = volumes.c.status == "awaiting-transfer"
            change.set(volumes, row.volume_id, {"status": "available"}, rule)
        resp.status = falcon.HTTP_202

    def on_post_accept(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req, self._minor)
        caller: VolumeCaller = req.context.caller
        caller.require_member("volume:accept_transfer")
        auth_key = ACCEPT.checked(read_object(req, "accept"), "accept")["auth_key"]
        with self._service.change() as change:
            row = change.connection.execute(select(transfers).where(transfers.c.id == key)).first()
            if row is None:
                raise fault("TransferNotFound", id=key)
            if not hmac.compare_digest(row.key_hash, _hash(row.salt, auth_key)):
                raise fault("InvalidAuthKey", id=key)
            _accept(change, caller, row)
        resp.status = falcon.HTTP_202
        brief = _brief(req, row)
        answer(resp, {"transfer": brief})


def _accept(change: VolumeChange, caller: VolumeCaller, row: DbRow) -> None:
    """The volume, with its snapshots unless they stay, is the caller's."""
    connection: Connection = change.connection
    volume = connection.execute(select(volumes).where(volumes.c.id == row.volume_id)).one()
    allowed = select(types.c.id).where(types.c.id == volume.type_id, may_use(caller.project_id))
    if connection.execute(allowed).first() is None:
        raise fault("TypeNotFound", id=volume.type_id)
    own = snapshots.c.volume_id == volume.id
    moved = [] if row.no_snapshots else connection.execute(select(snapshots).where(own)).all()
    if any(one.status != "available" for one in moved):
        raise fault("InvalidSnapshot", why="each snapshot of the volume must be available")
    quotas.spend(
        connection,
        caller.project_id,
        volume.type_id,
        volumes=1,
        snapshots=len(moved),
        gigabytes=volume.size + sum(one.size for one in moved),
    )
    owner = {"project_id": caller.project_id, "user_id": caller.user_id}
    rule = volumes.c.status == "awaiting-transfer"
    if not change.set(volumes, volume.id, owner | {"status": "available"}, rule):
        raise fault("InvalidVolume", why="status must be awaiting-transfer")
    if moved:
        connection.execute(update(snapshots).where(own).values(owner | {"updated_at": moment()}))
    change.remove(transfers, row.id)


def _hash(salt: str, key: str) -> str:
    # The key has 64 random bits: nobody finds it by trying.
    return hmac.new(salt.encode(), key.encode(), hashlib.sha256).hexdigest()


def _own(connection: Connection, caller: VolumeCaller, key: str) -> DbRow:
    row = connection.execute(
        select(transfers).where(transfers.c.id == key, caller.sees(transfers))
    ).first()
    if row is None:
        raise fault("TransferNotFound", id=key)
    return row


def _brief(req: falcon.Request, row: DbRow) -> Body:
    return {
        "id": row.id,
        "volume_id": row.volume_id,
        "name": row.name,
        "links": links(req, "volume-transfers" if since(req, 55) else "os-volume-transfer", row.id),
    }


def _detail(req: falcon.Request, row: DbRow) -> Body:
    found = _brief(req, row) | {"created_at": row.created_at}
    if since(req, 55):
        found["no_snapshots"] = row.no_snapshots
    if since(req, 57):
        found |= {
            "source_project_id": row.project_id,
            "destination_project_id": None,
            "accepted": False,
        }
    return found
