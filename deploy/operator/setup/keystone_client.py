# SPDX-License-Identifier: Apache-2.0
"""The edge between ``kilonova setup`` and Keystone: Kilonova's own login, and calls as an admin.

Tests replace ``KeystoneClient`` by a double. API: https://docs.openstack.org/api-ref/identity/v3/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urlencode

from keystoneauth1 import exceptions, session
from keystoneauth1.identity import v3

from common.domain.errors import ConfigError
from common.domain.json_types import JsonObject

SECONDS = 30.0
USER, PROJECT, DOMAIN = "kilonova", "service", "Default"


@dataclass(frozen=True)
class Login:
    """The roles of Kilonova's user, and type and URL of all public endpoints of the region."""

    roles: frozenset[str]
    endpoints: frozenset[tuple[str, str]]


class KeystoneClient:
    """Keystone.

    Args:
        url: The URL of version 3 in the configuration file.
        environment: Has an admin's variables, for example OS_USERNAME. Only changes need them.
        region: The region of the endpoints in ``Login``.
    """

    def __init__(self, url: str, environment: Mapping[str, str], region: str) -> None:
        self._url, self._environment, self.region = url, environment, region
        verify = environment.get("OS_CACERT") or True
        self._session = session.Session(timeout=SECONDS, verify=verify)

    def log_in(self, password: str, *, scoped: bool = True) -> Login | None:
        """Log in as Kilonova's user. Return None if Keystone refuses the user or the password.

        Args:
            password: The password of the user.
            scoped: Request a token for the project, which a user without roles does not get.

        Raises:
            ConfigError: Keystone does not answer, or answers with another error.
        """
        plugin = v3.Password(
            self._url,
            username=USER,
            password=password,
            user_domain_name=DOMAIN,
            project_name=PROJECT if scoped else None,
            project_domain_name=DOMAIN if scoped else None,
            unscoped=not scoped,
        )
        try:
            access = plugin.get_access(self._session)
        except exceptions.Unauthorized:
            return None
        except exceptions.ClientException as problem:
            raise ConfigError(f"Keystone at {self._url} (--keystone): {problem}") from problem
        endpoints = (
            access.service_catalog.get_endpoint_data_list(
                interface="public", region_name=self.region
            )
            if scoped
            else []
        )
        return Login(
            frozenset(access.role_names or ()),
            frozenset((str(row.service_type), str(row.url).rstrip("/")) for row in endpoints),
        )

    def find(self, collection: str, **filters: str) -> list[JsonObject]:
        """Return the resources that match the filters, as an admin.

        Raises:
            ConfigError: A variable of the admin is missing, or Keystone refuses the request.
        """
        answer = self._call("GET", f"/{collection}?{urlencode(filters)}")
        return list(answer[collection])

    def create(self, collection: str, **attributes: str) -> str:
        """Create a resource as an admin, and return the id. Errors as ``find``."""
        kind = collection.removesuffix("s")
        return str(self._call("POST", f"/{collection}", {kind: attributes})[kind]["id"])

    def assign(self, project: str, user: str, role: str) -> None:
        """Give the user the role in the project, by ids, as an admin. Errors as ``find``."""
        self._call("PUT", f"/projects/{project}/users/{user}/roles/{role}")

    def _call(self, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
        try:
            answer = self._session.request(
                f"{self._url}{path}", method, auth=self._admin, json=body
            )
        except exceptions.ClientException as problem:
            raise ConfigError(
                f"Keystone refuses {method} {path} as the admin in OS_USERNAME: {problem}"
            ) from problem
        return dict(answer.json()) if answer.content else {}

    @cached_property
    def _admin(self) -> v3.Password:
        return read_admin(self._environment, self._url)


def read_admin(environment: Mapping[str, str], url: str) -> v3.Password:
    """Return the login of an admin from the variables of the OpenStack client.

    Args:
        environment: The variables, for example OS_USERNAME and OS_PASSWORD.
        url: The URL of Keystone.

    Raises:
        ConfigError: Variables are missing. The text names the variables.
    """
    needed = ("OS_USERNAME", "OS_PASSWORD", "OS_PROJECT_NAME")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"an admin's variables of Keystone are missing: {', '.join(missing)}. Set them as for the command "
            "openstack. No clouds.yaml is read"
        )
    by_id = {name: environment.get(f"OS_{name}_DOMAIN_ID") for name in ("USER", "PROJECT")}
    by_name = {
        name: None if by_id[name] else environment.get(f"OS_{name}_DOMAIN_NAME", DOMAIN)
        for name in by_id
    }
    return v3.Password(
        url,
        username=environment["OS_USERNAME"],
        password=environment["OS_PASSWORD"],
        project_name=environment["OS_PROJECT_NAME"],
        user_domain_id=by_id["USER"],
        user_domain_name=by_name["USER"],
        project_domain_id=by_id["PROJECT"],
        project_domain_name=by_name["PROJECT"],
    )
