# SPDX-License-Identifier: Apache-2.0
"""The network service's records as users see and change them, with their own tokens: what the API
passes on.

A resource is a collection's name in the service's URLs, such as "security-groups". Nothing is
remembered here, and what the service answers is handed on as it is; who may do what is the
service's to say.
"""

from __future__ import annotations

from urllib.parse import quote

from common.clients.network import NetworkClient
from common.domain.json_types import JsonObject


class Records(NetworkClient):
    """A client that also makes, changes and removes. Every method raises what the service refuses
    with: BadRequest, Forbidden, NotFound or Conflict; and Unavailable when it does not answer."""

    def records(self, token: str, resource: str, **filters: object) -> list[JsonObject]:
        """Those that have all these values."""
        return self._all(token, resource, filters)

    def record(self, token: str, resource: str, record_id: str) -> JsonObject:
        """One of them."""
        return dict(self._json("GET", _path(resource, record_id), token)[_key(resource)])

    def create(self, token: str, resource: str, values: JsonObject) -> JsonObject:
        """Make one."""
        return dict(
            self._json("POST", f"/{resource}", token, {_key(resource): values})[_key(resource)]
        )

    def update(self, token: str, resource: str, record_id: str, values: JsonObject) -> JsonObject:
        """Change one."""
        return dict(
            self._json("PUT", _path(resource, record_id), token, {_key(resource): values})[
                _key(resource)
            ]
        )

    def delete(self, token: str, resource: str, record_id: str) -> None:
        """Remove one."""
        self._json("DELETE", _path(resource, record_id), token)


def _path(resource: str, record_id: str) -> str:
    return f"/{resource}/{quote(record_id, safe='')}"


def _key(resource: str) -> str:
    """Return the name of one record in a body, for example "policy" for "qos/policies"."""
    name = resource.rpartition("/")[2].replace("-", "_")
    return f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
