# SPDX-License-Identifier: Apache-2.0
"""/v3/auth: issue, validate and revoke tokens, and list the scopes of the caller."""

import falcon
from sqlalchemy import select

from deploy.one_machine.services.identity import schema, tokens
from deploy.one_machine.services.identity.authenticate import grant_of, unauthorized
from deploy.one_machine.services.identity.catalogue import catalogue_for
from deploy.one_machine.services.identity.resources import RESOURCES, listing
from deploy.one_machine.services.identity.service import IdentityService, require
from deploy.one_machine.services.identity.tokens import Token
from deploy.one_machine.services.json_types import Body
from deploy.one_machine.services.resource import Handler
from deploy.one_machine.services.web import answer, read_object


class Tokens(Handler[IdentityService]):
    """POST, GET and DELETE /v3/auth/tokens."""

    open_methods = ("POST",)

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        now = self._service.clock()
        attempts = self._service.throttle.attempts(req.remote_addr)
        grant = grant_of(self._service.database, read_object(req, "auth"), now, attempts)
        with self._service.database.write() as connection:
            secret = tokens.issue(connection, grant, now, self._service.lifetime)
            # A token without rights (no role there, something disabled) is rolled back.
            if (token := tokens.load(connection, secret, now)) is None:
                raise unauthorized()
        resp.status = falcon.HTTP_201
        resp.set_header("X-Subject-Token", secret)
        self._show(req, resp, token)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        secret, subject = self._subject(req)
        resp.set_header("X-Subject-Token", secret)
        self._show(req, resp, subject)

    def on_delete(self, req: falcon.Request, resp: falcon.Response) -> None:
        secret, _ = self._subject(req)
        with self._service.database.write() as connection:
            tokens.revoke(connection, secret)
        resp.status = falcon.HTTP_204

    def _subject(self, req: falcon.Request) -> tuple[str, Token]:
        """Return the secret and the token of the header X-Subject-Token.

        Raises:
            HTTPBadRequest: The header is missing.
            HTTPNotFound: The token is not valid, and the caller is an admin or a service.
            HTTPForbidden: The caller is neither, and the token is not valid or another user's.
        """
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


class OwnScopes(Handler[IdentityService]):
    """GET /v3/auth/projects, /v3/auth/domains, /v3/auth/system and /v3/users/{id}/projects."""

    def on_get_projects(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._answer_scopes(req, resp, req.context.caller.user_id, "projects")

    def on_get_domains(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._answer_scopes(req, resp, req.context.caller.user_id, "domains")

    def on_get_system(self, req: falcon.Request, resp: falcon.Response) -> None:
        caller: Token = req.context.caller
        with self._service.database.read() as connection:
            roles = tokens.roles_of(connection, caller.user_id, schema.SYSTEM)
        links = {"self": f"{req.prefix}/v3/auth/system"}
        answer(resp, {"system": [{"all": True}] if roles else [], "links": links})

    def on_get_user_projects(self, req: falcon.Request, resp: falcon.Response, key: str) -> None:
        require(req.context.caller.is_admin or req.context.caller.user_id == key)
        self._answer_scopes(req, resp, key, "projects")

    def _answer_scopes(
        self, req: falcon.Request, resp: falcon.Response, user_id: str, plural: str
    ) -> None:
        assignments, table = schema.ROLE_ASSIGNMENTS[plural], RESOURCES[plural].table
        target_ids = select(assignments.c[f"{plural[:-1]}_id"]).where(
            assignments.c.user_id == user_id
        )
        query = (
            select(table).where(table.c.enabled, table.c.id.in_(target_ids)).order_by(table.c.name)
        )
        answer(resp, listing(req, RESOURCES[plural], self._service.database.rows(query)))
