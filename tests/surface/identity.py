# SPDX-License-Identifier: Apache-2.0
"""An identity service in this process with a user for each persona, for use by keystonemiddleware.

``PERSONAS`` are the callers. The project "third" owns the records that are foreign to all of them.
All users have one password, which is hashed once.
"""

from __future__ import annotations

import io
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import sqlalchemy as sa
from falcon.testing import TestClient

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity import app, passwords, schema
from deploy.one_machine.services.identity.bootstrap import bootstrap
from deploy.one_machine.services.identity.service import IdentityService

PASSWORD = "correct horse"
#: Persona -> project and role. The persona without a role has no token. Roles imply lower roles, as
#: in Keystone.
PERSONAS = {
    "none": None,
    "other": ("other", "manager"),
    "service": ("service", "service"),
    "reader": ("own", "reader"),
    "member": ("own", "member"),
    "manager": ("own", "manager"),
    "admin": ("admin", "admin"),
}
OWNER = {"own": "member", "foreign": "third"}


class _Quiet(WSGIRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Do not log the request."""


def bound_input(application: Any) -> Any:
    """Wrap an application so that its input ends, as with gunicorn but not with wsgiref."""

    def entry(environ: dict[str, Any], start_response: Any) -> Any:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        return application(
            {**environ, "wsgi.input": io.BytesIO(environ["wsgi.input"].read(length))},
            start_response,
        )

    return entry


class Identity:
    """A running identity service. ``close`` ends the service.

    ``tokens`` maps personas to tokens. ``users`` and ``projects`` map names to ids.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "guard.db"
        self.database = Database(self.path, schema.METADATA)
        self._server = make_server("127.0.0.1", 0, None, handler_class=_Quiet)  # type: ignore[arg-type]
        self.url = f"http://127.0.0.1:{self._server.server_port}/v3"
        bootstrap(self.database, {"admin": PASSWORD, "kilonova": PASSWORD}, {"identity": self.url})
        self.users, self.projects = self._people()
        application = app.build(IdentityService(self.database, timedelta(hours=12)))
        self.tokens = self._tokens(TestClient(application))
        self._server.set_app(bound_input(application))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _people(self) -> tuple[dict[str, str], dict[str, str]]:
        digest, home = passwords.digest(PASSWORD), {"domain_id": schema.DEFAULT_DOMAIN, "extra": {}}
        with self.database.write() as connection:

            def names(table: sa.Table) -> dict[str, str]:
                return {
                    row.name: row.id
                    for row in connection.execute(sa.select(table.c.name, table.c.id))
                }

            roles = names(schema.roles)
            for name in ("own", "other", "third"):
                connection.execute(
                    sa.insert(schema.projects).values(home | {"id": uuid.uuid4().hex, "name": name})
                )
            projects = names(schema.projects)
            for persona, place in {**PERSONAS, "third": ("third", "member")}.items():
                if place is None or persona == "admin":
                    continue
                user = uuid.uuid4().hex
                connection.execute(
                    sa.insert(schema.users).values(
                        home | {"id": user, "name": persona, "password_hash": digest}
                    )
                )
                connection.execute(
                    sa.insert(schema.ROLE_ASSIGNMENTS["projects"]).values(
                        project_id=projects[place[0]], user_id=user, role_id=roles[place[1]]
                    )
                )
            return names(schema.users), projects

    def _tokens(self, client: TestClient) -> dict[str, str]:
        tokens = {}
        for name, place in {**PERSONAS, "third": ("third", "member")}.items():
            if place is not None:
                answer = client.simulate_post(
                    "/v3/auth/tokens",
                    json={
                        "auth": {
                            "identity": {
                                "methods": ["password"],
                                "password": {
                                    "user": {"id": self.users[name], "password": PASSWORD}
                                },
                            },
                            "scope": {"project": {"id": self.projects[place[0]]}},
                        }
                    },
                )
                assert answer.status_code == 201, answer.text
                tokens[name] = answer.headers["X-Subject-Token"]
        return tokens

    def options(self) -> SimpleNamespace:
        """Return the section [identity] of Kilonova's processes."""
        return SimpleNamespace(
            identity=SimpleNamespace(
                auth_url=self.url,
                username="kilonova",
                password=PASSWORD,
                domain="Default",
                project_name="service",
                region="RegionOne",
            )
        )

    def middleware(self) -> dict[str, Any]:
        """Return the options of the embedded services for keystonemiddleware."""
        return {
            "auth_type": "password",
            "auth_url": self.url,
            "username": "kilonova",
            "password": PASSWORD,
            "project_name": "service",
            "user_domain_id": "default",
            "project_domain_id": "default",
            "www_authenticate_uri": self.url,
            "token_cache_time": 3600,
            "include_service_catalog": False,
            "service_token_roles_required": True,
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.database.close()
