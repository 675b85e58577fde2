# SPDX-License-Identifier: Apache-2.0
"""/traits and /resource_providers/UUID/traits."""

from __future__ import annotations

from collections.abc import Callable

from common.domain import errors
from common.store.engine import Connection
from common.store.placement import allocations, providers, traits
from common.store.rows import ProviderRow
from compute_api.http.response import ApiResponse
from compute_api.placement.request import BadQuery, PlacementRequest
from compute_api.placement.schemas import CUSTOM_TRAIT


def index(request: PlacementRequest) -> ApiResponse:
    """Return the matching traits, with at most two SQL statements.

    The query may have ``name=in:A,B`` or ``name=startswith:PREFIX``, and ``associated=true`` (only
    traits of providers) or ``associated=false`` (only other traits).

    Raises:
        BadQuery: The query is invalid.
    """
    associated = (request.query_value("associated") or "").lower()
    if associated not in ("", "true", "false") or (
        "associated" in request.query and not associated
    ):
        raise BadQuery('The query parameter "associated" only accepts "true" or "false"')
    matches = _parse_name_filter(request.query_value("name"))
    names = request.read(traits.list_all, None if not associated else associated == "true")
    return ApiResponse({"traits": [name for name in names if matches(name)]})


def _parse_name_filter(text: str | None) -> Callable[[str], bool]:
    if text is None:
        return lambda name: True
    operator, colon, operand = text.partition(":")
    if not colon or operator not in ("in", "startswith"):
        raise BadQuery(
            "Badly formatted name parameter. Expected name query string parameter in form: "
            f'?name=[in|startswith]:[name1,name2|prefix]. Got: "{text[:300]}"'
        )
    names = set(operand.split(","))
    return names.__contains__ if operator == "in" else lambda name: name.startswith(operand)


def show(request: PlacementRequest, name: str) -> ApiResponse:
    """Return an empty response if the trait exists, with at most three SQL statements.

    Raises:
        NotFound: The trait does not exist.
    """
    return ApiResponse(modified=request.read(traits.show, name))


def create(request: PlacementRequest, name: str) -> ApiResponse:
    """Create a custom trait. The status is 201, or 204 if the trait exists.

    Raises:
        BadRequest: The name is not that of a custom trait.
    """
    try:
        CUSTOM_TRAIT.check_body(request.version, name)
    except errors.BadRequest as problem:
        raise errors.BadRequest(
            "The trait is invalid. A valid trait must be no longer than 255 characters, start with "
            'the prefix "CUSTOM_" and use following characters: "A"-"Z", "0"-"9" and "_"'
        ) from problem
    is_new = request.write(traits.create, name)
    return ApiResponse(
        status=201 if is_new else 204, headers={"Location": f"{request.base}/traits/{name}"}
    )


def delete(request: PlacementRequest, name: str) -> None:
    """Delete a custom trait that no provider has.

    Raises:
        NotFound: The trait does not exist.
        BadRequest: The trait is a standard trait.
        Conflict: A provider has the trait.
    """
    request.write(traits.delete, name)


def of_provider(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Return the traits of a provider, with two SQL statements.

    Raises:
        NotFound: The provider does not exist.
    """

    def work(tx: Connection) -> tuple[ProviderRow, list[str]]:
        provider = providers.show(tx, provider_uuid)
        return provider, traits.of(tx, [provider.id])[provider.id]

    return _view(*request.read(work))


def put(request: PlacementRequest, provider_uuid: str) -> ApiResponse:
    """Replace the traits that operators set for a provider, and return all traits.

    Traits that the provider's host reports stay.

    Raises:
        NotFound: The provider does not exist.
        BadRequest: A trait does not exist.
        Conflict: The provider has another generation than the body, or the body adds
            COMPUTE_STATUS_DISABLED to the provider of a host.
    """

    def work(tx: Connection) -> tuple[ProviderRow, list[str]]:
        provider = providers.lock(tx, provider_uuid, request.body["resource_provider_generation"])
        names = traits.put(tx, provider, request.body["traits"])
        allocations.touch(tx, [provider.id])
        return providers.show(tx, provider_uuid), names

    return _view(*request.write(work))


def clear(request: PlacementRequest, provider_uuid: str) -> None:
    """Remove all traits that operators set for a provider. Traits that a host reports stay.

    Raises:
        NotFound: The provider does not exist.
    """

    def work(tx: Connection) -> None:
        provider = providers.lock(tx, provider_uuid)
        traits.put(tx, provider, ())
        allocations.touch(tx, [provider.id])

    request.write(work)


def _view(provider: ProviderRow, names: list[str]) -> ApiResponse:
    return ApiResponse(
        {"resource_provider_generation": provider.generation, "traits": names},
        modified=provider.changed_at,
    )
