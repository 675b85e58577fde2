# SPDX-License-Identifier: Apache-2.0
"""What an action makes of its body before it is begun: the facts that its workflow gets, a secret, new columns.

One small function for each key of the body that says anything; ``PREPARERS`` is the list. Called by
``server_actions`` once the action is allowed. They read (the store, the image service with the caller's token) and
write nothing: what they made is committed by ``actions.begin`` together with the action, or not at all.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common import errors, ids, states
from common.clients.image import OWN_KEYS
from common.store import actions
from common.store.servers import loads
from common.wire import to_wire
from compute_api import passwords
from compute_api.microversions import Range
from compute_api.request import Answer, Request
from compute_api.resources import destinations
from compute_api.resources import server_parts as parts

_API = "os_compute_api:"
Begin = Callable[..., str]


@dataclass(frozen=True)
class Prepared:
    """An action that was understood.

    args: frozen facts for the workflow. password, files: sealed into the action's row. changes: columns of the server.
    answer: makes the answer when the action has been begun; None: an empty one. begin: what begins it in the store,
    called as ``actions.begin``. answer_after: the step that the answer waits for, where the row's own word is not all;
    failure: the error that its failure is.
    """

    args: dict[str, Any] = field(default_factory=dict)
    password: str | None = field(default=None, repr=False)
    changes: dict[str, Any] = field(default_factory=dict)
    answer: Callable[[], Answer] | None = None
    begin: Begin = actions.begin
    answer_after: str | None = None
    failure: type[errors.Problem] = errors.Conflict
    files: list[dict[str, str]] = field(default_factory=list, repr=False)


def refuse_changed(row: Any, judged: Any) -> None:
    """What was judged of a server without its lock, by its flavor and its image, holds of its locked row too.

    Raises:
        Conflict: it has got another one meanwhile.
    """
    if (row.flavor, row.image) != (judged.flavor, judged.image):
        raise errors.Conflict(f"Instance {judged.id} got another flavor or image while the request was checked; try "
                              "again.")


def nothing(request: Request, server: Any, given: Any) -> Prepared:
    """An action that its name says all of."""
    return Prepared()


def _lock(request: Request, server: Any, given: Any) -> Prepared:
    """The reason, from 2.73 on; before, the body is passed over."""
    known = given if request.version in Range("2.73") and given else {}
    return Prepared({"locked_reason": known.get("locked_reason")})


def _unlock(request: Request, server: Any, given: Any) -> Prepared:
    """Another's lock is undone by those only whom a rule of its own allows that."""
    owner = server.project_id == request.context.project_id and not request.is_admin
    if not server.locked or server.locked_by == ("owner" if owner else "admin"):
        return Prepared()
    request.require(_API + "os-lock-server:unlock:unlock_override",
                    {"project_id": server.project_id, "user_id": server.user_id})
    return Prepared({"override": True})


def _reset_state(request: Request, server: Any, given: Any) -> Prepared:
    return Prepared({"state": given["state"]})


def _change_password(request: Request, server: Any, given: Any) -> Prepared:
    if request.services.vault is None:
        raise errors.NotImplementedHere("This cloud cannot keep passwords until they are set; its operator can give it "
                                        "a [DEFAULT] secret_key.")
    return Prepared(password=given["adminPass"])


def _rescue(request: Request, server: Any, given: Any) -> Prepared:
    """The image to boot from, which the caller must be allowed to see; none: the server's own."""
    given = given or {}
    password, image_id, image = given.get("adminPass") or passwords.new(), given.get("rescue_image_ref"), None
    if image_id:
        found = request.services.images.show(image_id, request.context.token)
        if found.status != "active":
            raise errors.BadRequest(f"Image {image_id} is not active.")
        image = to_wire(found.ref)
    return Prepared({"image": image}, password, answer=lambda: Answer({"adminPass": password}, 200))


# --- images of servers ---
_BEFORE_IDS = Range(until="2.44")               # answers name the image by a link, not by its id
_COUNTED_METADATA = Range(until="2.38")
#: Properties of a server's image that its snapshots do not inherit: they are true of those bytes only.
_NOT_INHERITED = frozenset(("cache_in_nova", "bittorrent"))


def _properties(server: Any, given: dict[str, str], **more: str) -> dict[str, str]:
    """What is said of an image of this server: what its own image said, the caller's words, and where it is from, which
    nobody else can say; ``more`` likewise."""
    inherited = {key: value for key, value in loads(server.image or "{}").get("properties", {}).items()
                 if key not in _NOT_INHERITED and not key.startswith("img_signature")}
    return {**inherited, **given, "instance_uuid": server.id, "user_id": server.user_id,
            "base_image_ref": server.image_id or "", **more}


def _image_metadata(request: Request, given: dict[str, Any]) -> dict[str, str]:
    """The caller's words about the image, within the limit where there is one."""
    metadata: dict[str, str] = given.get("metadata", {})
    taken = sorted(OWN_KEYS & set(metadata))
    if taken:
        raise errors.BadRequest(f"metadata: an image has a field of the name {taken[0]}, which cannot be set so.")
    if request.version in _COUNTED_METADATA:
        parts.check_metadata(metadata, request.limits)
    return metadata


def _image_answer(request: Request, image_id: str, kept: bool = True) -> Answer:
    if request.version not in _BEFORE_IDS:
        return Answer({"image_id": image_id}, 202)
    return Answer(None, 202, {"Location": request.services.images.url(image_id)} if kept else {})


def _create_image(request: Request, server: Any, given: Any) -> Prepared:
    image_id = ids.new()
    properties = _properties(server, {"image_type": "snapshot", **_image_metadata(request, given)})
    return Prepared({"image_id": image_id, "name": given["name"].strip(), "properties": properties},
                    answer=lambda: _image_answer(request, image_id))


def _create_backup(request: Request, server: Any, given: Any) -> Prepared:
    image_id, rotation = ids.new(), int(given["rotation"])
    properties = _properties(server, _image_metadata(request, given), image_type="backup",
                             backup_type=given["backup_type"])
    return Prepared({"image_id": image_id, "name": given["name"].strip(), "properties": properties,
                     "backup_type": given["backup_type"], "rotation": rotation},
                    answer=lambda: _image_answer(request, image_id, kept=rotation > 0))


def _shelve(request: Request, server: Any, given: Any) -> Prepared:
    return Prepared({"image_id": ids.new(), "name": f"{server.name}-shelved",
                     "properties": _properties(server, {}, image_type="snapshot")})


# --- unshelving somewhere ---
_TO_A_ZONE = Range("2.77")


def _unshelve(request: Request, server: Any, given: Any) -> Prepared:
    """Where to: as before, or from 2.77 on in a zone that the server is then pinned to, from 2.91 on on a host."""
    given = given if request.version in _TO_A_ZONE and given else {}
    host, zone = given.get("host"), given.get("availability_zone", server.pinned_availability_zone)
    if host is not None:
        request.require(_API + "os-shelve:unshelve_to_host")
    if given and server.vm_state != states.SHELVED_OFFLOADED:
        raise errors.Conflict(f"Instance {server.id} is in vm_state {server.vm_state}; a zone or a host can be given "
                              "only while it is in vm_state shelved_offloaded.")
    request.read(destinations.check_back, zone if "availability_zone" in given or host else None, host,
                 request.services.settings.default_zone)
    pinning = "availability_zone" in given
    return Prepared({**destinations.Destination(zone, host).args, "unpin": pinning and zone is None},
                    changes={"pinned_availability_zone": zone} if pinning else {})


Prepare = Callable[[Request, Any, Any], Prepared]
#: By the body's key; others need ``nothing``. Rebuilds and moves are stories of their own: ``server_rebuild``,
#: ``server_moves``.
PREPARERS: dict[str, Prepare] = {
    "rescue": _rescue, "changePassword": _change_password, "createImage": _create_image,
    "createBackup": _create_backup, "lock": _lock, "unlock": _unlock, "os-resetState": _reset_state,
    "shelve": _shelve, "unshelve": _unshelve}
