# SPDX-License-Identifier: Apache-2.0
"""POST /servers, from the body to the 202.

``create`` calls all phases: parse the body, look up the resources that the body names, check them,
choose disks and interfaces, build the rows, commit. Each phase is a file of this folder. All
requests to external services precede the commit. They only read, except that new volumes are
created.

A repeated request with the same Idempotency-Key gets the answer of the first request and creates no
servers. The same key with another body is a 409 (``idempotency``).
"""

from __future__ import annotations

from common.domain import errors
from common.store.servers import servers
from compute_api.compute.request.creation import Created, idempotency_conflict
from compute_api.compute.request.request import Request
from compute_api.compute.servers.create.body import parse_body
from compute_api.compute.servers.create.checks import check
from compute_api.compute.servers.create.commit import commit
from compute_api.compute.servers.create.idempotency import IdempotentBody, parse_key
from compute_api.compute.servers.create.lookup import look_up
from compute_api.compute.servers.create.rows import build_servers
from compute_api.compute.servers.disks.disks import choose_disks
from compute_api.compute.servers.fields import DISK_CONFIG
from compute_api.compute.servers.networks.networks import choose_interfaces, parse_security_groups
from compute_api.http.response import ApiResponse
from compute_api.http.validation import is_true


def create(request: Request) -> ApiResponse:
    """Begin to create servers for POST /servers, and return the id of the first server.

    If return_reservation_id is true, the response has the reservation id instead. A repeated
    request with the same Idempotency-Key creates no servers and gets the ids of the first request.

    Raises:
        BadRequest, Forbidden, Conflict: A field or a resource that the body names cannot be used.
            Conflict also means a used Idempotency-Key with another body.
        OverQuota: The quota allows fewer than min_count servers.
        NotImplementedHere: There are files, and this cloud has no key to encrypt them.
        Unavailable: An external service does not answer, or the result of the commit is unknown.
    """
    identity = IdempotentBody(
        request.services.vault,
        request.context.project_id,
        parse_key(request.headers.get("IDEMPOTENCY-KEY")),
        request.body,
    )
    earlier = _find_earlier(request, identity)
    if earlier is not None:
        return _answer(request, earlier, identity, _read_disk_config(request, earlier.server_id))
    requested = parse_body(request)
    named = look_up(request, requested)
    check(request, named)
    disks = choose_disks(
        requested.devices.local,
        named.volumes.mappings,
        named.flavor,
        named.image.ref.properties,
        request.services.settings.max_local_disks,
    )
    interfaces = choose_interfaces(
        request, request.body["server"], requested.min_count, requested.max_count
    )
    new_servers = build_servers(request, requested, named, disks, interfaces)
    created = commit(request, new_servers, identity)
    if not created.repeated:
        request.services.wakeup.wake()
    return _answer(request, created, identity, new_servers.columns["disk_config"])


def _find_earlier(request: Request, identity: IdempotentBody) -> Created | None:
    """Return the result of an earlier request with the same Idempotency-Key, or None.

    Why: this comes before all other phases, because resources that the body names may have been
    deleted since the earlier request.

    Raises:
        Conflict: The earlier request had another body.
    """
    if identity.key is None:
        return None
    keys = [identity.key]
    row = request.read(servers.idempotent, request.context.project_id, keys).get(identity.key)
    if row is None:
        return None
    if row.digest not in identity.digests:
        raise idempotency_conflict()
    return Created(row.server_id, row.reservation_id, repeated=True, digest=row.digest)


def _read_disk_config(request: Request, server_id: str) -> str:
    """Return the disk_config of the body, else of this server, else MANUAL for a deleted server."""
    if (disk_config := request.body["server"].get(DISK_CONFIG)) is not None:
        return str(disk_config)
    try:
        return str(request.read(servers.show, server_id, request.scope).disk_config)
    except errors.NotFound:
        return "MANUAL"


def _answer(
    request: Request, created: Created, identity: IdempotentBody, disk_config: str
) -> ApiResponse:
    body = request.body["server"]
    if is_true(body.get("return_reservation_id", False)):
        return ApiResponse({"reservation_id": created.reservation_id})
    links = request.links.of("servers", created.server_id)
    password = (
        identity.password_again(created.server_id, created.digest)
        if created.repeated
        else identity.password(created.server_id)
    )
    return ApiResponse(
        {
            "server": {
                "id": created.server_id,
                "links": links,
                "OS-DCF:diskConfig": disk_config,
                "security_groups": parse_security_groups(body),
                **({} if password is None else {"adminPass": password}),
            }
        },
        headers={"Location": links[0]["href"]},
    )
