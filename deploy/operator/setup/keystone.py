# SPDX-License-Identifier: Apache-2.0
"""Kilonova at Keystone: the user with roles, and the services with endpoints.

The checks log in as Kilonova's user, so a repeated command needs no admin.
"""

from __future__ import annotations

from common.domain.errors import ConfigError
from deploy.operator.config_check import WANTED_ROLES
from deploy.operator.setup.configuration import Values
from deploy.operator.setup.keystone_client import DOMAIN, PROJECT, USER, KeystoneClient
from deploy.operator.setup.plan import Step

#: Type of the service -> name, and path behind the public URL.
SERVICES = {"compute": ("nova", "/v2.1"), "placement": ("placement", "/placement")}


class Registration:
    """Kilonova's user, services and endpoints at Keystone."""

    def __init__(self, keystone: KeystoneClient, values: Values) -> None:
        self._keystone, self._password = keystone, values.service
        self._urls = {kind: f"{values.public}{path}" for kind, (_, path) in SERVICES.items()}

    def steps(self) -> list[Step]:
        names = " and ".join(sorted(WANTED_ROLES))
        return [
            Step(f"Keystone: user {USER} with the roles {names}", self._has_roles, self._add_user),
            Step(
                f"Keystone: public endpoints {' and '.join(self._urls.values())}",
                self._has_endpoints,
                self._add_endpoints,
            ),
        ]

    def _has_roles(self) -> bool:
        login = self._keystone.log_in(self._password)
        return login is not None and login.roles >= WANTED_ROLES

    def _add_user(self) -> None:
        domain = self._ensure("domains", name=DOMAIN)
        users = self._keystone.find("users", name=USER, domain_id=domain)
        if users and self._keystone.log_in(self._password, scoped=False) is None:
            raise ConfigError(
                f"Keystone has a user {USER} with another password than [identity] password in kilonova.conf. Set that "
                f"password with openstack user set --password-prompt {USER}, or delete the user if no program uses it"
            )
        project = self._ensure("projects", name=PROJECT, domain_id=domain)
        user = (
            str(users[0]["id"])
            if users
            else self._keystone.create(
                "users", name=USER, domain_id=domain, password=self._password
            )
        )
        for role in sorted(WANTED_ROLES):
            self._keystone.assign(project, user, self._ensure("roles", name=role))

    def _ensure(self, collection: str, **attributes: str) -> str:
        """Return the id of a resource with these attributes, and create it if necessary."""
        present = self._keystone.find(collection, **attributes)
        return str(present[0]["id"]) if present else self._keystone.create(collection, **attributes)

    def _has_endpoints(self) -> bool:
        login = self._keystone.log_in(self._password)
        return login is not None and login.endpoints >= self._urls.items()

    def _add_endpoints(self) -> None:
        region = self._keystone.region
        for kind, url in self._urls.items():
            services = self._keystone.find("services", type=kind)
            endpoints = [
                endpoint
                for service in services
                for endpoint in self._keystone.find(
                    "endpoints", service_id=service["id"], interface="public", region_id=region
                )
            ]
            others = [endpoint for endpoint in endpoints if endpoint["url"].rstrip("/") != url]
            if others:
                raise ConfigError(
                    f"Keystone has the public endpoint {others[0]['url']} of {kind} in {region}, but Kilonova needs "
                    f"{url}. Give that URL by --public, or run: openstack endpoint delete {others[0]['id']}"
                )
            if not endpoints:
                service = (
                    str(services[0]["id"])
                    if services
                    else self._keystone.create("services", type=kind, name=SERVICES[kind][0])
                )
                self._keystone.create(
                    "endpoints", service_id=service, interface="public", region=region, url=url
                )
