# SPDX-License-Identifier: Apache-2.0
"""/v3/auth: tokens (issue, validate, revoke), and what the caller's token opens."""

import falcon
from sqlalchemy import Table, select

from deploy.standalone.identity import schema, tokens
from deploy.standalone.identity.authenticate import grant_of, unauthorized
from deploy.standalone.identity.catalogue import catalogue_for
from deploy.standalone.identity.resources import RESOURCES, listing
from deploy.standalone.identity.service import IdentityService, require
from deploy.standalone.identity.tokens import Token
from deploy.standalone.json_types import Body
from deploy.standalone.web import answer, read_object


class Tokens:
    """POST, GET, HEAD and DELETE /v3/auth/tokens."""

    open_methods = ("POST",)

    def __init__(self, service: IdentityService) -> None:
        self._service = service

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        now = self._service.clock()
        attempts = self._service.throttle.attempts(req.remote_addr)
        grant = grant_of(self._service.database, read_object(req, "auth"), now, attempts)
        with self._service.database.write() as connection:
            secret = tokens.issue(connection, grant, now, self._service.lifetime)
            # One that would be worth nothing (no role there, something disabled) is rolled back.
            if (token := tokens.load(connection, secret, now)) is None:
                raise unauthorized()
        resp.status = falcon.HTTP_201
        resp.set_header("X-Subject-Token", secret)
        self._show(req, resp, token)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        secret, subject = self._subject(req)
        resp.set_header("X-Subject-Token", secret)
        self._show(req, resp, subject)

    def on_head(self, req: falcon.Request, resp: falcon.Response) -> None:
        self.on_get(req, resp)

    def on_delete(self, req: falcon.Request, resp: falcon.Response) -> None:
        secret, _ = self._subject(req)
        with self._service.database.write() as connection:
            tokens.revoke(connection, secret)
        resp.status = falcon.HTTP_204

    def _subject(self, req: falcon.Request) -> tuple[str, Token]:
        """The token asked about. Raises 400 without the header, 404 when it is worth nothing."""
        caller: Token = req.context.caller
        if not (secret := req.get_header("X-Subject-Token")):
            raise falcon.HTTPBadRequest(description="The header X-Subject-Token is required.")
        subject = self._service.load(secret)
        if subject is None:
            require(caller.may_validate)
            raise falcon.HTTPNotFound(description="Could not find token.")
        require(caller.may_validate or caller.user_id == subject.user_id)
        return secret, subject

    def _show(self, req: falcon.Request, resp: falcon.Response, token: Token) -> None:
        catalogue: list[Body] | None = None
        if not req.has_param("nocatalog") and token.roles:
            with self._service.database.read() as connection:
                catalogue = catalogue_for(connection, token)
        resp.set_header("Vary", "X-Auth-Token")
        answer(resp, tokens.view(token, catalogue))


class OwnScopes:
    """GET /v3/auth/catalog, /v3/auth/projects, /v3/auth/domains, /v3/auth/system and
    /v3/users/{id}/projects."""

    def __init__(self, service: IdentityService) -> None:
        self._service = service

    def on_get_catalog(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: Token = req.context.caller
        with self._service.database.read() as connection:
            entries = catalogue_for(connection, caller)
        answer(resp, {"catalog": entries, "links": {"self": f"{req.prefix}/v3/auth/catalog"}})

    def on_get_projects(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._answer_scopes(req, resp, req.context.caller.user_id, "projects", schema.project_roles)

    def on_get_domains(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._answer_scopes(req, resp, req.context.caller.user_id, "domains", schema.domain_roles)

    def on_get_system(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: Token = req.context.caller
        with self._service.database.read() as connection:
            held = tokens.system_roles_of(connection, caller.user_id)
        answer(
            resp,
            {
                "system": [{"all": True}] if held else [],
                "links": {"self": f"{req.prefix}/v3/auth/system"},
            },
        )

    def on_get_user_projects(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req.context.caller.is_admin or req.context.caller.user_id == key)
        self._answer_scopes(req, resp, key, "projects", schema.project_roles)

    def _answer_scopes(
        self, req: falcon.Request, resp: falcon.Response, user_id: str, plural: str, held: Table
    ) -> None:
        resource, target = (
            RESOURCES[plural],
            held.c.project_id if plural == "projects" else held.c.domain_id,
        )
        table = resource.table
        query = select(table).where(
            table.c.enabled, table.c.id.in_(select(target).where(held.c.user_id == user_id))
        )
        with self._service.database.read() as connection:
            rows = connection.execute(query.order_by(table.c.name)).all()
        answer(resp, listing(req, resource, rows))
