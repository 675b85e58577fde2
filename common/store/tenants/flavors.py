# SPDX-License-Identifier: Apache-2.0
"""Flavors: the sizes that servers are made in, who may see them and their extra specs.

Called by the API. A server freezes its flavor when it is created, so rows here may change and
vanish freely. A flavor that is not public is seen by admins and by the projects in
``flavor_access``; for everybody else it does not exist. Memory and swap in MiB, disks in GiB.
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

#: What the API calls the columns when it sorts.
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
    # Columns that the API knows and we do not have: every row has the same value there.
    "disabled": flavors.c.id,
    "updated_at": flavors.c.id,
    "vcpu_weight": flavors.c.id,
}
#: Was this new row committed?
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
    """One page of flavors.

    Args:
        project_id: see what this project may see; None: an admin, who sees all.
        is_public: only these; None: both kinds.
        marker: the flavorid after which the page starts.

    Raises:
        BadRequest: the marker names no flavor; ``name`` is no regular expression.
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
    """The flavor with the API's id ``flavorid``, if ``project_id`` (None: an admin) may see it.

    Raises:
        NotFound: there is none, or not for this project.
    """
    query = sa.select(flavors).where(flavors.c.flavorid == flavorid)
    if project_id is not None:
        query = query.where(_visible_to(project_id))
    row = tx.execute(query).first()
    if row is None:
        raise errors.NotFound(f"Flavor {flavorid} could not be found.")
    return row


def create(tx: Connection, values: Values) -> FlavorRow:
    """Insert a flavor.

    Raises:
        Conflict: its id or name is taken.
    """
    taken = tx.execute(
        sa.select(flavors.c.flavorid).where(
            (flavors.c.flavorid == values["flavorid"]) | (flavors.c.name == values["name"])
        )
    ).all()
    try:
        if taken:
            raise _taken(values, any(row.flavorid == values["flavorid"] for row in taken))
        tx.execute(sa.insert(flavors).values(created_at=now()), {"extra_specs": {}, **values})
    except IntegrityError as problem:  # another API process was first
        raise _taken(values, True) from problem
    _tell(tx, "flavor.create", values["flavorid"])
    return show(tx, values["flavorid"])


def _taken(values: Values, same_id: bool) -> errors.Conflict:
    if same_id:
        return errors.Conflict(f"Flavor with ID {values['flavorid']} already exists.")
    return errors.Conflict(f"Flavor with name {values['name']} already exists.")


def describe(tx: Connection, flavorid: str, description: str | None) -> FlavorRow:
    """Change the description. Raises NotFound."""
    show(tx, flavorid)
    tx.execute(
        sa.update(flavors).where(flavors.c.flavorid == flavorid).values(description=description)
    )
    _tell(tx, "flavor.update", flavorid)
    return show(tx, flavorid)


def delete(tx: Connection, flavorid: str) -> None:
    """Remove the flavor and who may use it; servers keep their copy. Raises NotFound."""
    row = show(tx, flavorid)
    _tell(tx, "flavor.delete", flavorid)
    tx.execute(sa.delete(flavor_access).where(flavor_access.c.flavor_id == row.id))
    tx.execute(sa.delete(flavors).where(flavors.c.id == row.id))


def set_extra_specs(
    tx: Connection, flavorid: str, add: dict[str, str], remove: str | None = None
) -> dict[str, str]:
    """Add or overwrite extra specs, or remove the one named; all of them as they are then.

    Raises:
        NotFound: no such flavor, or no such extra spec to remove.
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
    """The 404 for an extra spec that the flavor does not have."""
    return errors.NotFound(f"Flavor {flavorid} has no extra specs with key {key}.")


def access(tx: Connection, flavor_id: int) -> list[str]:
    """The projects that may use a flavor that is not public, by its row's number."""
    return list(
        tx.scalars(
            sa.select(flavor_access.c.project_id)
            .where(flavor_access.c.flavor_id == flavor_id)
            .order_by(flavor_access.c.project_id)
        )
    )


def grant(tx: Connection, row: FlavorRow, project_id: str) -> None:
    """Let a project use the flavor. Raises Conflict when it already may."""
    if project_id in access(tx, row.id):
        raise errors.Conflict(
            f"Flavor access already exists for flavor {row.flavorid} and project {project_id} "
            "combination."
        )
    insert_ignore(tx, flavor_access, {"flavor_id": row.id, "project_id": project_id})
    _tell(tx, "flavor.update", row.flavorid)


def revoke(tx: Connection, row: FlavorRow, project_id: str) -> None:
    """Take it back. Raises NotFound when it was not given."""
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
    """With the projects that may use it, unless all may."""
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
    """The row as the record that a server freezes."""
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


def _visible_to(project_id: str) -> sa.ColumnElement[bool]:
    granted = sa.select(flavor_access.c.flavor_id).where(flavor_access.c.project_id == project_id)
    return flavors.c.is_public.is_(True) | flavors.c.id.in_(granted)
