# SPDX-License-Identifier: Apache-2.0
"""Records of the network service for users, with their own tokens, which the API passes on.

A resource is the name of a collection in the service's URLs, for example "security-groups". Nothing
is cached, and records are returned unchanged. The service decides on permissions.
"""

from __future__ import annotations

from urllib.parse import quote

from common.clients.network import NetworkClient
from common.domain.json_types import JsonObject


class Records(NetworkClient):
    """A client that can also create, change and delete records of the network service.

    ``resource`` is the name of a collection in the service's URLs, for example "security-groups".
    Every method raises BadRequest, Forbidden, NotFound or Conflict if the service refuses, and
    Unavailable if it does not answer.
    """

    def records(self, token: str, resource: str, **filters: object) -> list[JsonObject]:
        """Return the records of a collection that the token may see and that match all filters.

        ``resource`` is the collection, for example "security-groups". All pages are read.
        """
        return self._all(token, resource, filters)

    def record(self, token: str, resource: str, record_id: str) -> JsonObject:
        """Return a record of a collection ``resource``, for example "security-groups".

        Raises:
            NotFound: The record does not exist, or the token may not see it.
        """
        return dict(self._json("GET", _path(resource, record_id), token)[_key(resource)])

    def create(self, token: str, resource: str, values: JsonObject) -> JsonObject:
        """Create a record in a collection ``resource``, and return the whole stored record."""
        return dict(
            self._json("POST", f"/{resource}", token, {_key(resource): values})[_key(resource)]
        )

    def update(self, token: str, resource: str, record_id: str, values: JsonObject) -> JsonObject:
        """Change these fields of a record in a collection ``resource``. Return the whole record.

        Raises:
            NotFound: The record does not exist, or the token may not see it.
        """
        return dict(
            self._json("PUT", _path(resource, record_id), token, {_key(resource): values})[
                _key(resource)
            ]
        )

    def delete(self, token: str, resource: str, record_id: str) -> None:
        """Delete a record in a collection ``resource``, for example "security-groups".

        Raises:
            NotFound: The record does not exist, or the token may not see it.
        """
        self._json("DELETE", _path(resource, record_id), token)


def _path(resource: str, record_id: str) -> str:
    return f"/{resource}/{quote(record_id, safe='')}"


def _key(resource: str) -> str:
    """Return the name of one record in a body, for example "policy" for "qos/policies"."""
    name = resource.rpartition("/")[2].replace("-", "_")
    return f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")
