# SPDX-License-Identifier: Apache-2.0
"""The routes of the identity service, all in one list."""


from deploy.standalone.identity.account import ApplicationCredentials, Password
from deploy.standalone.identity.assignments import HELD, SYSTEM, Assignments, RoleAssignments
from deploy.standalone.identity.auth import Mine, Tokens
from deploy.standalone.identity.catalogue import Versions
from deploy.standalone.identity.gate import Gate
from deploy.standalone.identity.limits import Limits, Registered
from deploy.standalone.identity.nouns import KINDS, Collection, Item
from deploy.standalone.web import App, application


def build(gate: Gate) -> App:
    """The WSGI application over the database, clock and token lifetime of `gate`."""
    app = application([])
    versions, mine, credentials = Versions(), Mine(gate), ApplicationCredentials(gate)
    app.add_route("/", versions)
    app.add_route("/v3", versions, suffix="v3")
    app.add_route("/v3/auth/tokens", Tokens(gate))
    app.add_route("/v3/auth/catalog", mine, suffix="catalog")
    app.add_route("/v3/auth/projects", mine, suffix="projects")
    app.add_route("/v3/auth/domains", mine, suffix="domains")
    app.add_route("/v3/auth/system", mine, suffix="system")
    app.add_route("/v3/users/{key}/projects", mine, suffix="user_projects")
    app.add_route("/v3/users/{key}/password", Password(gate))
    app.add_route("/v3/users/{key}/application_credentials", credentials)
    app.add_route("/v3/users/{key}/application_credentials/{credential}", credentials, suffix="one")
    app.add_route("/v3/role_assignments", RoleAssignments(gate))
    for targets in HELD:
        assignments = Assignments(gate, targets)
        app.add_route(f"/v3/{targets}/{{key}}/users/{{user}}/roles", assignments, suffix="all")
        app.add_route(f"/v3/{targets}/{{key}}/users/{{user}}/roles/{{role}}", assignments)
    assignments = Assignments(gate, SYSTEM)
    app.add_route("/v3/system/users/{user}/roles", assignments, suffix="all")
    app.add_route("/v3/system/users/{user}/roles/{role}", assignments)
    limits = Limits(gate)
    app.add_route("/v3/limits/model", limits, suffix="model")
    for plural, resource in (("limits", limits), ("registered_limits", Registered(gate))):
        app.add_route(f"/v3/{plural}", resource)
        app.add_route(f"/v3/{plural}/{{key}}", resource, suffix="one")
    for plural, kind in KINDS.items():
        app.add_route(f"/v3/{plural}", Collection(gate, kind))
        app.add_route(f"/v3/{plural}/{{key}}", Item(gate, kind))
    return app
