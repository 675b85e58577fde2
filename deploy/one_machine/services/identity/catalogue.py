# SPDX-License-Identifier: Apache-2.0
"""The version documents and the service catalogue."""

import falcon
from sqlalchemy import Connection, select

from deploy.one_machine.services.identity.schema import endpoints, services
from deploy.one_machine.services.identity.tokens import Token
from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.web import answer

MEDIA = [{"base": "application/json", "type": "application/vnd.openstack.identity-v3+json"}]


def version(base: str) -> Body:
    """Return Keystone's version document of API v3.

    Args:
        base: The URL of this service without a path, as in the request.
    """
    return {
        "id": "v3.14",
        "status": "stable",
        "updated": "2020-04-07T00:00:00Z",
        "media-types": MEDIA,
        "links": [{"rel": "self", "href": f"{base}/v3/"}],
    }


class IdentityVersions:
    """GET / and GET /v3, open to every client."""

    open_methods = ("GET",)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.status = falcon.HTTP_300
        answer(resp, {"versions": {"values": [version(req.prefix)]}})

    def on_get_v3(self, req: falcon.Request, resp: falcon.Response) -> None:
        answer(resp, {"version": version(req.prefix)})


def catalogue_for(connection: Connection, token: Token) -> list[Body]:
    """Return the catalogue of a token: the enabled services with their enabled endpoints.

    Ids of the token replace placeholders in the URLs. An endpoint whose URL needs an id that the
    token does not have is left out, and so is a service without any other endpoint.
    """
    rows = connection.execute(
        select(
            services.c.id,
            services.c.type,
            services.c.name,
            endpoints.c.id.label("endpoint_id"),
            endpoints.c.interface,
            endpoints.c.region_id,
            endpoints.c.url,
        )
        .join(endpoints, endpoints.c.service_id == services.c.id)
        .where(services.c.enabled, endpoints.c.enabled)
        .order_by(services.c.type, services.c.id, endpoints.c.region_id, endpoints.c.interface)
    )
    entries: dict[str, Body] = {}
    for row in rows:
        if (url := _fill(row.url, token)) is not None:
            entry = entries.setdefault(
                row.id, {"id": row.id, "type": row.type, "name": row.name, "endpoints": []}
            )
            place = {
                "interface": row.interface,
                "region": row.region_id,
                "region_id": row.region_id,
            }
            entry["endpoints"].append({"id": row.endpoint_id, "url": url} | place)
    return list(entries.values())


def _fill(url: str, token: Token) -> str | None:
    """Return `url` with the token's ids in place of the placeholders.

    Placeholders are $(project_id)s, $(tenant_id)s and $(user_id)s, also with "%" for "$".

    Returns:
        None if the token does not have the id of a placeholder.
    """
    ids = {
        "project_id": token.row.project_id,
        "tenant_id": token.row.project_id,
        "user_id": token.user_id,
    }
    for name, value in ids.items():
        for mark in (f"$({name})s", f"%({name})s"):
            if mark in url and value is None:
                return None
            url = url.replace(mark, value or "")
    return url
