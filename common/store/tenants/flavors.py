# SPDX-License-Identifier: Apache-2.0
"""Flavors: the sizes of servers, their extra specs, and the projects that may use them.

The API calls this file. A server stores a copy of its flavor, so rows here may change and be
deleted at any time. A private flavor is visible to admins and to the projects in ``flavor_access``.
Memory and swap are in MiB, disks in GiB.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from common.domain import errors, models
from common.store.engine import insert_ignore, is_there, notification_settings, now
from common.store.notifications import outbox
from common.store.pagination import SortOrder, after
from common.store.regular_expressions import fetch, matches
from common.store.rows import FlavorRow, Values
from common.store.schema import flavor_access, flavors

#: The API's sort keys.
SORT_KEYS: dict[str, sa.ColumnElement[object]] = {
    "created_at": flavors.c.created_at,
    "description": flavors.c.description,
    "ephemeral_gb": flavors.c.ephemeral_gb,
    "flavorid": flavors.c.flavorid,
    "id": flavors.c.id,
    "is_public": flavors.c.is_public,
    "memory_mb": flavors.c.memory_mb,
    "name": flavors.c.name,
    "root_gb": flavors.c.root_gb,
    "rxtx_factor": flavors.c.rxtx_factor,
    "swap": flavors.c.swap_mb,
    "vcpus": flavors.c.vcpus,
    # Columns of Nova that Kilonova does not have. All rows count as equal.
    "disabled": flavors.c.id,
    "updated_at": flavors.c.id,
    "vcpu_weight": flavors.c.id,
}
#: Returns True if this new row was committed.
is_made = is_there(flavors)


def page(
    tx: Connection,
    *,
    project_id: str | None,
    is_public: bool | None = None,
    min_ram: int = 0,
    min_disk: int = 0,
    name: str | None = None,
    sort_key: str = "flavorid",
    descending: bool = False,
    marker: str | None = None,
    limit: int = 1000,
) -> list[FlavorRow]:
    """Return one page of flavors.

    Args:
        tx: The transaction.
        project_id: Only flavors visible to this project. None: all, for admins.
        is_public: Only public (True) or private flavors (False). None: both.
        min_ram: Only flavors with at least this memory, in MiB.
        min_disk: Only flavors with at least this root disk, in GiB.
        name: Regular expression that matches anywhere in the name. None: any name.
        sort_key: A key of ``SORT_KEYS``.
        descending: Reverse the order.
        marker: The flavorid after which the page starts.
        limit: Most flavors to return.

    Raises:
        BadRequest: The marker is not a flavorid, or ``name`` is no valid regular expression.
    """
    query = sa.select(flavors).where(flavors.c.memory_mb >= min_ram, flavors.c.root_gb >= min_disk)
    if project_id is not None:
        query = query.where(_visible_to(project_id))
    if is_public is not None:
        query = query.where(flavors.c.is_public == is_public)
    if name is not None:
        query = query.where(matches("name", flavors.c.name, name))
    order = [SortOrder(SORT_KEYS[sort_key], descending), SortOrder(flavors.c.id, descending)]
    if marker is not None:
        row = tx.execute(
            sa.select(*(key.value.label(f"k{i}") for i, key in enumerate(order))).where(
                flavors.c.flavorid == marker
            )
        ).first()
        if row is None:
            raise errors.BadRequest(f"marker [{marker}] not found")
        query = query.where(after(order, list(row)))
    return list(fetch(tx, query.order_by(*(key.clause for key in order)).limit(limit)))


def show(tx: Connection, flavorid: str, project_id: str | None = None) -> FlavorRow:
    """Return the flavor with this id in the API.

    Args:
        tx: The transaction.
        flavorid: Id of the flavor in the API.
        project_id: The flavor must be visible to this project. None: any flavor, for admins.

    Raises:
        NotFound: The flavor does not exist, or not for this project.
    """
    statement = _SHOW if project_id is None else _SHOW_VISIBLE
    row = tx.execute(statement, {"flavor": flavorid, "project": project_id}).first()
    if row is None:
        raise errors.NotFound(f"Flavor {flavorid} could not be found.")
    return row


def create(tx: Connection, values: Values) -> FlavorRow:
    """Insert a flavor with these columns, and return the new row.

    Raises:
        Conflict: The id or name is in use.
    """
    taken = tx.execute(
        sa.select(flavors.c.flavorid).where(
            (flavors.c.flavorid == values["flavorid"]) | (flavors.c.name == values["name"])
        )
    ).all()
    try:
        if taken:
            raise _duplicate_error(values, any(row.flavorid == values["flavorid"] for row in taken))
        tx.execute(sa.insert(flavors).values(created_at=now()), {"extra_specs": {}, **values})
    except IntegrityError as problem:  # another API process was first
        raise _duplicate_error(values, True) from problem
    _tell(tx, "flavor.create", values["flavorid"])
    return show(tx, values["flavorid"])


def _duplicate_error(values: Values, same_id: bool) -> errors.Conflict:
    if same_id:
        return errors.Conflict(f"Flavor with ID {values['flavorid']} already exists.")
    return errors.Conflict(f"Flavor with name {values['name']} already exists.")


def describe(tx: Connection, flavorid: str, description: str | None) -> FlavorRow:
    """Change the description of a flavor (None: no description), and return the flavor.

    Raises:
        NotFound: The flavor does not exist.
    """
    show(tx, flavorid)
    tx.execute(
        sa.update(flavors).where(flavors.c.flavorid == flavorid).values(description=description)
    )
    _tell(tx, "flavor.update", flavorid)
    return show(tx, flavorid)


def delete(tx: Connection, flavorid: str) -> None:
    """Delete a flavor and the projects' access to it. Servers keep their copy of the flavor.

    Raises:
        NotFound: The flavor does not exist.
    """
    row = show(tx, flavorid)
    _tell(tx, "flavor.delete", flavorid)
    tx.execute(sa.delete(flavor_access).where(flavor_access.c.flavor_id == row.id))
    tx.execute(sa.delete(flavors).where(flavors.c.id == row.id))


def set_extra_specs(
    tx: Connection, flavorid: str, add: dict[str, str], remove: str | None = None
) -> dict[str, str]:
    """Add or overwrite extra specs, remove the key ``remove``, and return the flavor's extra specs.

    Raises:
        NotFound: The flavor does not exist, or has no extra spec ``remove``.
    """
    row = tx.execute(
        sa.select(flavors).where(flavors.c.flavorid == flavorid).with_for_update()
    ).first()
    if row is None:
        raise errors.NotFound(f"Flavor {flavorid} could not be found.")
    specs: dict[str, str] = {**row.extra_specs, **add}
    if remove is not None:
        if remove not in specs:
            raise no_extra_spec(flavorid, remove)
        del specs[remove]
    tx.execute(sa.update(flavors).where(flavors.c.id == row.id).values(extra_specs=specs))
    _tell(tx, "flavor.update", flavorid)
    return specs


def no_extra_spec(flavorid: str, key: str) -> errors.NotFound:
    """Return the 404 error for a missing extra spec. The caller raises the error."""
    return errors.NotFound(f"Flavor {flavorid} has no extra specs with key {key}.")


def access(tx: Connection, flavor_id: int) -> list[str]:
    """Return the projects with access to a private flavor. ``flavor_id`` is ``FlavorRow.id``."""
    return list(
        tx.scalars(
            sa.select(flavor_access.c.project_id)
            .where(flavor_access.c.flavor_id == flavor_id)
            .order_by(flavor_access.c.project_id)
        )
    )


def grant(tx: Connection, row: FlavorRow, project_id: str) -> None:
    """Permit a project to use a private flavor.

    Raises:
        Conflict: The project has access already.
    """
    if project_id in access(tx, row.id):
        raise errors.Conflict(
            f"Flavor access already exists for flavor {row.flavorid} and project {project_id} "
            "combination."
        )
    insert_ignore(tx, flavor_access, {"flavor_id": row.id, "project_id": project_id})
    _tell(tx, "flavor.update", row.flavorid)


def revoke(tx: Connection, row: FlavorRow, project_id: str) -> None:
    """Withdraw a project's access to a private flavor.

    Raises:
        NotFound: The project has no access.
    """
    gone = tx.execute(
        sa.delete(flavor_access).where(
            flavor_access.c.flavor_id == row.id, flavor_access.c.project_id == project_id
        )
    )
    if not gone.rowcount:
        raise errors.NotFound(
            f"Flavor access not found for {row.flavorid} / {project_id} combination."
        )
    _tell(tx, "flavor.update", row.flavorid)


def _tell(tx: Connection, event: str, flavorid: str) -> None:
    """Write a notice about a flavor, with the projects that may use a private one.

    With notifications off, nothing is written.
    """
    if notification_settings(tx) is None:
        return
    row = show(tx, flavorid)
    outbox.tell(
        tx,
        flavorid,
        {**row._mapping, "projects": None if row.is_public else access(tx, row.id)},
        event,
    )


def record(row: FlavorRow) -> models.Flavor:
    """Return the copy of a flavor that is stored with a server."""
    return models.Flavor(
        id=row.flavorid,
        name=row.name,
        vcpus=row.vcpus,
        memory_mb=row.memory_mb,
        root_gb=row.root_gb,
        ephemeral_gb=row.ephemeral_gb,
        swap_mb=row.swap_mb,
        extra_specs=dict(row.extra_specs),
        number=row.id,
    )


def _visible_to(project_id: str | sa.BindParameter[str]) -> sa.ColumnElement[bool]:
    granted = sa.select(flavor_access.c.flavor_id).where(flavor_access.c.project_id == project_id)
    return flavors.c.is_public.is_(True) | flavors.c.id.in_(granted)


_SHOW = sa.select(flavors).where(flavors.c.flavorid == sa.bindparam("flavor"))
_SHOW_VISIBLE = _SHOW.where(_visible_to(sa.bindparam("project")))
