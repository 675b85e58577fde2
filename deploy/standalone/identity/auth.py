# SPDX-License-Identifier: Apache-2.0
"""/v3/auth: tokens (issue, validate, revoke), and what the caller's token opens."""

from typing import Any

import falcon
from sqlalchemy import Table, select

from deploy.standalone.identity import schema, tokens
from deploy.standalone.identity.authenticate import grant_of, unauthorized
from deploy.standalone.identity.catalogue import catalogue_for
from deploy.standalone.identity.gate import Gate
from deploy.standalone.identity.nouns import KINDS, listing
from deploy.standalone.identity.tokens import Token
from deploy.standalone.web import answer, read_object


class Tokens:
    """POST, GET, HEAD and DELETE /v3/auth/tokens."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        now = self._gate.clock()
        attempts = self._gate.throttle.attempts(req.remote_addr)
        grant = grant_of(self._gate.database, read_object(req, "auth"), now, attempts)
        with self._gate.database.write() as connection:
            secret = tokens.issue(connection, grant, now, self._gate.lifetime)
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
        with self._gate.database.write() as connection:
            tokens.revoke(connection, secret)
        resp.status = falcon.HTTP_204

    def _subject(self, req: falcon.Request) -> tuple[str, Token]:
        """The token asked about. Raises 400 without the header, 404 when it is worth nothing."""
        caller = self._gate.caller(req)
        if not (secret := req.get_header("X-Subject-Token")):
            raise falcon.HTTPBadRequest(description="The header X-Subject-Token is required.")
        subject = self._gate.load(secret)
        if subject is None:
            self._gate.allow(caller, lambda token: token.may_validate)
            raise falcon.HTTPNotFound(description="Could not find token.")
        self._gate.allow(caller, lambda token: token.may_validate or token.user_id == subject.user_id)
        return secret, subject

    def _show(self, req: falcon.Request, resp: falcon.Response, token: Token) -> None:
        catalogue: list[dict[str, Any]] | None = None
        if not req.has_param("nocatalog") and token.roles:
            with self._gate.database.read() as connection:
                catalogue = catalogue_for(connection, token)
        resp.set_header("Vary", "X-Auth-Token")
        answer(resp, tokens.view(token, catalogue))


class Mine:
    """GET /v3/auth/catalog, /v3/auth/projects, /v3/auth/domains, /v3/auth/system and
    /v3/users/{id}/projects."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_get_catalog(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller = self._gate.caller(req)
        with self._gate.database.read() as connection:
            entries = catalogue_for(connection, caller)
        answer(resp, {"catalog": entries, "links": {"self": f"{req.prefix}/v3/auth/catalog"}})

    def on_get_projects(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._entered(req, resp, self._gate.caller(req).user_id, "projects", schema.project_roles)

    def on_get_domains(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._entered(req, resp, self._gate.caller(req).user_id, "domains", schema.domain_roles)

    def on_get_system(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller = self._gate.caller(req)
        with self._gate.database.read() as connection:
            held = tokens.system_roles_of(connection, caller.user_id)
        answer(resp, {"system": [{"all": True}] if held else [], "links": {"self": f"{req.prefix}/v3/auth/system"}})

    def on_get_user_projects(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        self._gate.self_or_admin(req, key)
        self._entered(req, resp, key, "projects", schema.project_roles)

    def _entered(
        self, req: falcon.Request, resp: falcon.Response, user_id: str, noun: str, held: Table
    ) -> None:
        kind = KINDS[noun]
        target = held.c.project_id if noun == "projects" else held.c.domain_id
        query = select(kind.table).where(
            kind.table.c.enabled, kind.table.c.id.in_(select(target).where(held.c.user_id == user_id)))
        with self._gate.database.read() as connection:
            rows = connection.execute(query.order_by(kind.table.c.name)).all()
        answer(resp, listing(req, kind, rows))
