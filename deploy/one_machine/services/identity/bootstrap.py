# SPDX-License-Identifier: Apache-2.0
"""The first rows of the identity service: an admin, a service user and the catalogue.

With these rows an admin can log in, and services find each other.
`bootstrap` can be repeated. It adds missing rows, sets the two passwords and the endpoints' URLs,
and removes the endpoints of services that do not exist any more. All other rows stay.
"""

import uuid
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, Table, delete, insert, select, update

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.identity import passwords, schema
from deploy.one_machine.services.json_types import Body

REGION = "RegionOne"
ROLES = ("admin", "manager", "member", "reader", "service")
#: Names of services by type, as in OpenStack's guides: some clients search the catalogue by name.
SERVICES = {
    "identity": "keystone",
    "compute": "nova",
    "image": "glance",
    "network": "neutron",
    "block-storage": "cinder",
    "placement": "placement",
}
USERS = (("admin", "admin", ("admin",)), ("kilonova", "service", ("service", "admin")))
"""(user, project, roles in that project)."""
IN_SYSTEM = {"admin": "admin", "kilonova": "reader"}
"""User -> role in the whole cloud. Services need the role reader there to read limits."""


def bootstrap(
    database: Database,
    user_passwords: Mapping[str, str],
    endpoints: Mapping[str, str],
    without: Sequence[str] = (),
) -> None:
    """Create the missing domain, roles, projects, users, region, services and endpoints.

    The two users get missing role assignments. A repeated call sets their passwords and the URLs in
    ``endpoints`` again.

    Args:
        database: The service's database.
        user_passwords: Passwords of the users "admin" and "kilonova".
        endpoints: Service type -> the URL of its public, internal and admin endpoint.
        without: Service types whose endpoints are removed.
    """
    users = select(schema.users).where(schema.users.c.domain_id == schema.DEFAULT_DOMAIN)
    stored = {row.name: row.password_hash for row in database.rows(users)}
    hashes = {
        name: stored[name]
        if name in stored and passwords.matches(stored[name], password)
        else passwords.digest(password)
        for name, password in user_passwords.items()
    }
    with database.write() as connection:
        _ensure(connection, schema.domains, {"name": "Default"}, {"id": schema.DEFAULT_DOMAIN})
        _ensure(connection, schema.regions, {"id": REGION})
        roles = {name: _ensure(connection, schema.roles, {"name": name}) for name in ROLES}
        for user, project, names in USERS:
            role_ids = [roles[name] for name in names]
            key = _ensure_user(connection, user, hashes[user], project, role_ids)
            assignment = {"user_id": key, "role_id": roles[IN_SYSTEM[user]]}
            _ensure_row(connection, schema.ROLE_ASSIGNMENTS[schema.SYSTEM], assignment)
        for kind, url in endpoints.items():
            name = {"name": SERVICES.get(kind, kind)}
            service = _ensure(connection, schema.services, {"type": kind}, name)
            for interface in ("public", "internal", "admin"):
                place = {"service_id": service, "region_id": REGION, "interface": interface}
                key = _ensure(connection, schema.endpoints, place, {"url": url})
                _set(connection, schema.endpoints, key, url=url)
        missing_services = select(schema.services.c.id).where(schema.services.c.type.in_(without))
        connection.execute(
            delete(schema.endpoints).where(schema.endpoints.c.service_id.in_(missing_services))
        )


def _ensure_user(
    connection: Connection, name: str, password_hash: str, project: str, roles: list[str]
) -> str:
    home = {"domain_id": schema.DEFAULT_DOMAIN}
    project_id = _ensure(connection, schema.projects, home | {"name": project})
    user_id = _ensure(connection, schema.users, home | {"name": name})
    _set(connection, schema.users, user_id, password_hash=password_hash)
    for role_id in roles:
        assignment = {"project_id": project_id, "user_id": user_id, "role_id": role_id}
        _ensure_row(connection, schema.ROLE_ASSIGNMENTS["projects"], assignment)
    return user_id


def _set(connection: Connection, table: Table, key: str, **columns: str) -> None:
    connection.execute(update(table).where(table.c.id == key).values(columns))


def _ensure_row(connection: Connection, table: Table, key: Body) -> None:
    if connection.execute(select(table).filter_by(**key)).first() is None:
        connection.execute(insert(table).values(key))


def _ensure(connection: Connection, table: Table, key: Body, rest: Body | None = None) -> str:
    """Return the id of the row with the columns `key`. A missing row is inserted with `rest`."""
    row_id = connection.scalar(select(table.c.id).filter_by(**key))
    if row_id is None:
        values = {"id": uuid.uuid4().hex, **key, **(rest or {})}
        connection.execute(insert(table).values(values))
        row_id = values["id"]
    return str(row_id)
