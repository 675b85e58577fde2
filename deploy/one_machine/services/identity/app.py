# SPDX-License-Identifier: Apache-2.0
"""The routes of the identity service, all in one list."""

from deploy.one_machine.services.identity.assignments import Assignments
from deploy.one_machine.services.identity.auth import OwnScopes, Tokens
from deploy.one_machine.services.identity.catalogue import IdentityVersions
from deploy.one_machine.services.identity.limits import LimitModel, ProjectLimits, RegisteredLimits
from deploy.one_machine.services.identity.resources import RESOURCES
from deploy.one_machine.services.identity.schema import ROLE_ASSIGNMENTS, SYSTEM
from deploy.one_machine.services.identity.service import IdentityService, TokenAuthentication
from deploy.one_machine.services.resource import Collection, PatchItem
from deploy.one_machine.services.web import App, application


def build(service: IdentityService) -> App:
    """Return the WSGI application of the identity service, with all routes."""
    app = application([TokenAuthentication(service)])
    versions, own_scopes = IdentityVersions(), OwnScopes(service)
    app.add_route("/", versions)
    app.add_route("/v3", versions, suffix="v3")
    app.add_route("/v3/auth/tokens", Tokens(service))
    app.add_route("/v3/auth/projects", own_scopes, suffix="projects")
    app.add_route("/v3/auth/domains", own_scopes, suffix="domains")
    app.add_route("/v3/auth/system", own_scopes, suffix="system")
    app.add_route("/v3/users/{key}/projects", own_scopes, suffix="user_projects")
    for targets in ROLE_ASSIGNMENTS:
        path = f"/v3/{targets}" if targets == SYSTEM else f"/v3/{targets}/{{key}}"
        assignments = Assignments(service, targets)
        app.add_route(f"{path}/users/{{user}}/roles", assignments, suffix="all")
        app.add_route(f"{path}/users/{{user}}/roles/{{role}}", assignments)
    app.add_route("/v3/limits/model", LimitModel())
    for limits in (RegisteredLimits(), ProjectLimits()):
        app.add_route(f"/v3/{limits.plural}", Collection(service, limits))
        app.add_route(f"/v3/{limits.plural}/{{key}}", PatchItem(service, limits))
    for plural, resource in RESOURCES.items():
        app.add_route(f"/v3/{plural}", Collection(service, resource))
        app.add_route(f"/v3/{plural}/{{key}}", PatchItem(service, resource))
    return app
