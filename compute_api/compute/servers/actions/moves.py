# SPDX-License-Identifier: Apache-2.0
"""Prepare the actions that move a server: resize, migrations, evacuate, confirm, revert.

Unlike the actions of ``preparers``, these actions begin through ``store.servers.migrations``, which
opens the migration, or reads the finished migration, in the same transaction. This module refuses
unknown hosts, the server's own host, unsuitable flavors, and a flavor that exceeds the quota.
Whether a server fits on a host is the scheduler's decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from common.clients import image_checks
from common.clients.image import ACTIVE as IMAGE_ACTIVE
from common.domain import errors, hardware, models, states
from common.domain.context import RequestContext
from common.domain.json_types import JsonObject
from common.domain.statuses import MigrationType
from common.domain.wire import from_wire
from common.store.engine import Connection
from common.store.hosts import services
from common.store.rows import MigrationRow, ServerRecord
from common.store.servers import actions, migrations, servers, volumes
from common.store.servers.servers import loads
from common.store.tenants import quotas
from compute_api.compute.request import passwords
from compute_api.compute.request.request import Request
from compute_api.compute.servers import destinations
from compute_api.compute.servers import fields as server_fields
from compute_api.compute.servers.create.lookup import read_flavor
from compute_api.compute.servers.destinations import Destination
from compute_api.compute.servers.disks import disks as server_disks
from compute_api.compute.servers.prepared_action import Begin, PreparedAction, refuse_changed
from compute_api.compute.views.servers.servers import ATTRIBUTES
from compute_api.http.microversions import Range
from compute_api.http.response import ApiResponse
from compute_api.http.validation import is_true

_API = "os_compute_api:"
#: Filters apply to named hosts from _LIVE_CHECKED and _EVACUATE_CHECKED on. From _LIVE_LATER on the
#: response to a live migration does not wait for the check of the hosts.
_HOST_OF_MIGRATE, _LIVE_CHECKED, _LIVE_LATER = Range("2.56"), Range("2.30"), Range("2.34")
_PASSWORD_SHOWN, _EVACUATE_CHECKED, _STOPPED = Range(until="2.13"), Range("2.29"), Range("2.95")


def _make_begin(kind: MigrationType) -> Begin:
    """Return a function that begins an action and opens a migration of this kind."""

    def begin(tx: Connection, rows: Sequence[states.Action], server_id: str, **others: Any) -> str:  # noqa: ANN401 - passed on unchanged
        return migrations.begin(tx, rows[0], server_id, kind, **others)

    return begin


# --- resize ---
def resize(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare a resize to the flavor in ``flavorRef``.

    Raises:
        BadRequest: The flavor does not exist for the caller, is the current flavor, is too small
            for the image or the disks, gives the server too many disks, or needs hardware that
            Kilonova does not support. Or the body has disk config AUTO, which the image disables.
        Forbidden: Kilonova's own user cannot read the image, so hosts could not download it.
        Conflict: The server is on no host. Or, when the action begins, another request has changed
            the flavor or the image.
        HostDown: The server's host is down.
        OverQuota: The quota does not allow the larger flavor. This is raised when the action
            begins.
        Unavailable: The image service does not answer.
    """
    flavor = request.read(read_flavor, request, server_fields.parse_flavor_id(body["flavorRef"]))
    old = from_wire(models.Flavor, loads(server.flavor))
    has_disk = not server.volumes or request.read(volumes.root_of, server.id) is None
    _check_change(old, flavor, has_disk)
    server_disks.check_resize(
        old, loads(server.disks or "null"), flavor, request.services.settings.max_local_disks
    )
    properties = loads(server.image or "{}").get("properties", {})
    image_checks.check_hardware(flavor, properties)
    server_fields.choose_disk_config(body, server.image_id, properties)
    if flavor.memory_mb < old.memory_mb or old.root_gb == 0:
        _check_image(request, server, flavor)
    _check_source(request, server, errors.HostDown)
    limits = request.services.quota.source(server.project_id)

    def begin(
        tx: Connection,
        rows: Sequence[states.Action],
        server_id: str,
        *,
        changes: JsonObject,
        **arguments: Any,  # noqa: ANN401 - passed on unchanged
    ) -> str:
        quotas.lock(tx, server.project_id)
        actions.take_lock(tx, server_id, arguments["project_id"])
        row = servers.show(tx, server_id)
        # The requests to external services were made without the lock.
        refuse_changed(row, server)
        larger = _count_larger(tx, limits(tx), row, flavor)
        return migrations.begin(
            tx,
            rows[0],
            server_id,
            MigrationType.RESIZE,
            new_flavor=flavor,
            changes={**changes, **larger},
            **arguments,
        )

    changes = {"disk_config": body["OS-DCF:diskConfig"]} if "OS-DCF:diskConfig" in body else {}
    return PreparedAction({"host": None, "forced": False}, changes=changes, begin=begin)


def _check_change(old: models.Flavor, new: models.Flavor, has_disk: bool) -> None:
    """Check that the flavor changes, and that a root disk on the host does not shrink.

    A flavor that was deleted and created again with the same id and another size is another flavor.

    Args:
        old: The current flavor.
        new: The requested flavor.
        has_disk: Whether the root disk is a disk on the host. False means a volume.

    Raises:
        BadRequest: The flavor is the current flavor, or ``has_disk`` is True and the root disk of
            the new flavor is smaller.
    """
    if old.id == new.id and _list_sizes(old) == _list_sizes(new):
        raise errors.BadRequest("When resizing, instances must change flavor!")
    if has_disk and new.root_gb < old.root_gb:
        to = (
            f"from {old.root_gb} GiB to {new.root_gb} GiB"
            if new.root_gb
            else "to a flavor without a disk"
        )
        raise errors.BadRequest(
            "flavorRef: Server disk was unable to be resized because: the root disk cannot change "
            f"{to}; choose a flavor with at least the same disk size."
        )


def _list_sizes(flavor: models.Flavor) -> tuple[int, ...]:
    return flavor.vcpus, flavor.memory_mb, flavor.root_gb, flavor.ephemeral_gb, flavor.swap_mb


def _check_image(request: Request, server: ServerRecord, flavor: models.Flavor) -> None:
    """Check that the flavor has enough memory and disk for the server's image.

    The check is skipped if the server has no image, or the image does not exist for the caller.

    Raises:
        BadRequest: The flavor is too small, or hosts cannot use the image.
        Forbidden: Kilonova's own user cannot read the image, so hosts could not download it.
        Unavailable: The image service does not answer.
    """
    if server.image_id is None:
        return
    try:
        image = request.image(server.image_id)
    except errors.BadRequest:
        # The image was deleted or is not visible any more. The server does not need the image.
        return
    image = replace(image, status=IMAGE_ACTIVE)
    image_checks.check_disk(image)
    image_checks.check_flavor(image, flavor)


def _count_larger(
    tx: Connection, limits: quotas.Numbers, server: ServerRecord, flavor: models.Flavor
) -> dict[str, int]:
    """Return vcpus and memory_mb that the quota counts during the move: the larger of both flavors.

    The caller has locked the project.

    Raises:
        OverQuota: The quota of the project or of the server's user does not allow the difference.
    """
    larger = {
        "vcpus": max(server.vcpus, flavor.vcpus),
        "memory_mb": max(server.memory_mb, flavor.memory_mb),
    }
    image = loads(server.image or "{}")
    difference = Counter(hardware.resources_of(flavor, image))
    difference.subtract(
        hardware.resources_of(from_wire(models.Flavor, loads(server.flavor)), image)
    )
    quotas.Account(tx, server.project_id, limits).room(
        server.user_id,
        quotas.Size(
            0, larger["vcpus"] - server.vcpus, larger["memory_mb"] - server.memory_mb, +difference
        ),
    )
    return larger


# --- destinations ---
def _require_host(server: ServerRecord) -> str:
    if server.host is None:
        raise errors.Conflict(f"Instance {server.id} is on no host; there is nothing to move.")
    return str(server.host)


def _check_source(request: Request, server: ServerRecord, problem: type[errors.Problem]) -> None:
    """Raise ``problem`` if the host of the server is down or forced down.

    Raises:
        Conflict: The server is on no host.
    """
    if not request.read(services.is_up, _require_host(server)):
        raise problem(
            _describe_unavailable(request, server)
            if problem is errors.BadRequest
            else f"Instance {server.id} is on a host that is down; try again when it is up. If the host stays "
            "down, an administrator can evacuate the server."
        )


def _describe_unavailable(request: Request, server: ServerRecord) -> str:
    host = server.host if request.allows(ATTRIBUTES) else f"instance {server.id}"
    return f"Compute service of {host} is unavailable at this time."


def _check_host(request: Request, host: str | None) -> None:
    """Raise BadRequest if the body names a host that does not exist."""
    if host is not None:
        request.read(
            destinations.resolve, Destination(host=host), request.services.settings.default_zone
        )


def migrate(request: Request, server: ServerRecord, body: JsonObject | None) -> PreparedAction:
    """Prepare a cold migration, from 2.56 on optionally to a named host.

    Raises:
        BadRequest: The named host does not exist, or is the server's host.
        Forbidden: The caller may not name a host.
        Conflict: The server is on no host.
        HostDown: The server's host is down.
    """
    host = (body or {}).get("host") if request.version in _HOST_OF_MIGRATE else None
    _require_for_host(request, server, "os-migrate-server:migrate:host", host)
    _check_host(request, host)
    if host is not None and host == server.host:
        raise errors.BadRequest("Cannot migrate to the host where the server exists.")
    _check_source(request, server, errors.HostDown)
    return PreparedAction({"host": host, "forced": False}, begin=_make_begin(MigrationType.COLD))


def _require_for_host(request: Request, server: ServerRecord, rule: str, host: str | None) -> None:
    if host is not None:
        request.require(_API + rule, {"project_id": server.project_id, "user_id": server.user_id})


def _is_forced(body: JsonObject, checked: bool) -> bool:
    """Return whether the move skips the operator's filters for the named host.

    Args:
        body: The value of the action in the body, with ``host`` and ``force``.
        checked: Whether filters apply to named hosts at this microversion, unless ``force`` is set.

    Raises:
        BadRequest: ``force`` is true, and the body has no host.
    """
    if is_true(body.get("force", False)) and not body.get("host"):
        raise errors.BadRequest("Can't force to a non-provided destination")
    return bool(body.get("host")) and (is_true(body.get("force", False)) or not checked)


def migrate_live(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare a live migration.

    Before 2.34 the response waits until the hosts have checked that the migration is possible. If
    this check fails, the response is BadRequest.

    Raises:
        BadRequest: The named host does not exist, is down or is the server's host, or the server's
            host is down. Or ``force`` is true without a host.
        Forbidden: The caller may not name a host.
        Conflict: The server is on no host.
    """
    host, block = body["host"], body["block_migration"]
    _require_for_host(request, server, "os-migrate-server:migrate_live:host", host)
    forced = _is_forced(body, request.version in _LIVE_CHECKED)
    _check_host(request, host)
    if host is not None and host == server.host:
        raise errors.BadRequest(
            f"Unable to migrate instance ({server.id}) to current host ({host})."
        )
    _check_source(request, server, errors.BadRequest)
    if host is not None and not request.read(services.is_up, host):
        raise errors.BadRequest(f"Compute service of {host} is unavailable at this time.")
    args = {
        "host": host,
        "forced": forced,
        "block_migration": None if block == "auto" else is_true(block),
    }
    return PreparedAction(
        args,
        begin=_make_begin(MigrationType.LIVE),
        failure=errors.BadRequest,
        answer_after=None if request.version in _LIVE_LATER else "prepare",
    )


# --- away from a dead host ---
def evacuate(request: Request, server: ServerRecord, body: JsonObject) -> PreparedAction:
    """Prepare an evacuation, which recreates the server on another host.

    Raises:
        BadRequest: The host of the server is up, or may still run guests and cannot be fenced. Or
            the requested host is the server's host. Or ``force`` is true without a host, or the
            body has a password although onSharedStorage is true.
        NotFound: The requested host does not exist.
        Conflict: The server is on no host.
    """
    host, shared = (
        body.get("host"),
        is_true(body["onSharedStorage"]) if "onSharedStorage" in body else None,
    )
    if shared and "adminPass" in body:
        raise errors.BadRequest("admin password can't be changed on existing disk")
    forced = _is_forced(body, request.version in _EVACUATE_CHECKED)
    try:
        _check_host(request, host)
    except errors.BadRequest as problem:
        raise errors.NotFound(f"Compute host {host} not found.") from problem
    if host is not None and host == server.host:
        raise errors.BadRequest("The target host can't be the same one.")
    _check_dead(request, _require_host(server))
    password = None if shared else body.get("adminPass") or passwords.generate()
    answer_body = {"adminPass": password} if request.version in _PASSWORD_SHOWN else None
    return PreparedAction(
        {"host": host, "forced": forced, "stopped": request.version in _STOPPED, "shared": shared},
        password,
        answer=lambda: ApiResponse(answer_body, 200),
        begin=_make_begin(MigrationType.EVACUATION),
    )


def _check_dead(request: Request, host: str) -> None:
    """Raise BadRequest unless the host is down, and is forced down or can be fenced.

    A host that does not answer may still run guests. The first step of the workflow checks this
    again.
    """
    if request.read(services.is_up, host):
        raise errors.BadRequest(f"Compute service of {host} is still in use.")
    if not request.services.settings.fencing and not request.read(services.are_dead, host):
        raise errors.BadRequest(services.NO_PROOF.format(host=host))


# --- the end of a resize ---
def confirm(request: Request, server: ServerRecord, body: object) -> PreparedAction:
    """Prepare the confirmation of a resize or cold migration.

    The action deletes the old guest at the source. If the source is down or does not confirm this
    in time, the old guest stays a pending cleanup. After a resize on the same host, the action
    deletes the copies of the old files there, and fails if the host is down.
    """
    return PreparedAction(begin=_make_closing_begin())


def revert(request: Request, server: ServerRecord, body: object) -> PreparedAction:
    """Prepare the return of a resized or cold migrated server to the source.

    Raises:
        HostDown: The source is down, or the destination is down and may still run the guest. This
            is raised when the action begins.
    """

    def check(tx: Connection, server_id: str) -> None:
        move = migrations.open_of(tx, [server_id]).get(server_id)
        if move is not None:
            _check_return(tx, request, move)

    return PreparedAction(begin=_make_closing_begin(check))


def _make_closing_begin(check: Callable[[Connection, str], None] | None = None) -> Begin:
    """Return a function that begins a confirm or a revert of the server's finished migration.

    Args:
        check: Called before the begin, in the same transaction, with the server's id. An error
            refuses the action. None means no check.
    """

    def begin(
        tx: Connection,
        rows: Sequence[states.Action],
        server_id: str,
        *,
        context: RequestContext,
        project_id: str | None,
        **unused: object,
    ) -> str:
        if check is not None:
            check(tx, server_id)
        return migrations.close(tx, rows[0], server_id, context=context, project_id=project_id)

    return begin


def _check_return(tx: Connection, request: Request, move: MigrationRow) -> None:
    """Check that the server can return to the source.

    Errors name the host only if the policy lets the caller see the hosts of servers.

    Raises:
        HostDown: The source is down, or the destination is down and may still run the guest.
    """
    shows_hosts = request.allows(ATTRIBUTES)
    source, dest = move.source_host or "", move.dest_host or ""
    if not services.is_up(tx, source):
        host = f"The source host {source}" if shows_hosts else "The source host"
        raise errors.HostDown(
            f"{host} of the resize is down. Revert when this host is up again, or confirm the "
            "resize: the host removes the old guest when it is up again."
        )
    if not services.is_up(tx, dest) and not services.are_dead(tx, dest):
        host = f"The server's host {dest}" if shows_hosts else "The server's host"
        raise errors.HostDown(
            f"{host} does not answer, and the server may still run there. Revert when the host is "
            "up again. If the host is certainly off, an administrator can force it down first: "
            f"openstack compute service set --down {dest if shows_hosts else 'HOST'} "
            "nova-compute"
        )
