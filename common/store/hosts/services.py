# SPDX-License-Identifier: Apache-2.0
"""Services: one row per process kind and host, and a narrow row of heartbeats.

The conductors decide whether a service is up (``judge``) and store that. All other processes read
the flag. Silence counts only while the judging conductor receives its own messages and most hosts
send heartbeats. Every change of a flag sets ``changed_at`` of the host's provider, so that
schedulers notice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors, ids
from common.domain.clock import SECOND
from common.domain.service_binaries import COMPUTE_DISABLED, Binary
from common.store.engine import for_update, insert_ignore, notification_settings, now
from common.store.notifications import outbox
from common.store.rows import HeardServiceRow, ServiceRow
from common.store.schema import heartbeats, provider_traits, providers, services

#: Why a silent host is not evacuated, and the next step.
NO_PROOF = (
    "Host {host} is silent, which does not prove that its guests are dead: they may run and write. Set a "
    "fencing hook, [conductor] fencing_hook; or when you are sure that the host is off, force it down: "
    "openstack compute service set --down {host} nova-compute"
)
#: With fewer hosts one live host suffices. Otherwise this share (MOST) must be alive for silence to
#: count.
FEW, MOST = 5, 0.8


def enrol(tx: Connection, host: str, binary: str, version: str | None = None) -> None:
    """Insert an enabled service, and a heartbeat row with ``up`` True, each only if missing.

    Args:
        tx: The transaction.
        host: Name of the host.
        binary: The kind of the service.
        version: The version of the service's code, which is recorded. None: the version stays.
    """
    which = (services.c.host == host, services.c.binary == binary)
    row = tx.execute(sa.select(services.c.version).where(*which)).first()
    if row is None:
        insert_ignore(
            tx,
            services,
            {
                "uuid": ids.new(),
                "host": host,
                "binary": binary,
                "disabled": False,
                "forced_down": False,
                "created_at": now(),
                "updated_at": now(),
                "version": version,
            },
        )
        _tell(tx, "service.create", *which)
    elif version not in (None, row.version):
        tx.execute(sa.update(services).where(*which).values(version=version))
    insert_ignore(tx, heartbeats, {"host": host, "binary": binary, "seen_at": now(), "up": True})


def _tell(tx: Connection, event: str, *which: sa.ColumnElement[bool]) -> None:
    if notification_settings(tx) is not None and (
        row := tx.execute(_select_services().where(*which)).mappings().first()
    ):
        outbox.tell(tx, row["uuid"], row, event)


def beat(tx: Connection, hosts: Iterable[str], binary: str) -> None:
    """Record heartbeats of the services ``binary`` on these hosts, in one statement.

    More statements follow if a service is down or has no heartbeat row. Services that are down
    become up, and schedulers read their hosts again. Missing services are inserted again, except
    nova-compute, whose host must register again.
    """
    names = sorted(set(hosts))
    if tx.execute(_BEAT, {"of_binary": binary, "names": names}).rowcount == len(names):
        return
    if binary != Binary.COMPUTE:
        for name in names:
            enrol(tx, name, binary)
    heard = sa.and_(heartbeats.c.binary == binary, heartbeats.c.host.in_(names))
    back = tx.scalars(sa.select(heartbeats.c.host).where(heard, heartbeats.c.up.is_(False))).all()
    tx.execute(
        sa.update(heartbeats)
        .where(heard, heartbeats.c.up.is_(False))
        .values(seen_at=now(), up=True)
    )
    if binary == Binary.COMPUTE and back:
        _touch_providers(tx, back)


#: Statements that every conductor repeats are built once.
_BEAT = (
    sa.update(heartbeats)
    .where(
        heartbeats.c.binary == sa.bindparam("of_binary"),
        heartbeats.c.host.in_(sa.bindparam("names", expanding=True)),
        heartbeats.c.up.is_(True),
    )
    .values(seen_at=now())
)
_SEEN_AT = sa.select(heartbeats.c.seen_at).where(
    heartbeats.c.host == sa.bindparam("host"), heartbeats.c.binary == sa.bindparam("binary")
)
_LATE = sa.select(heartbeats.c.host, heartbeats.c.binary).where(
    heartbeats.c.up.is_(True),
    heartbeats.c.seen_at < now() - sa.bindparam("silence", type_=sa.BigInteger),
)


def seen_at(tx: Connection, host: str, binary: str) -> int | None:
    """Return the time of a service's last heartbeat in µs, or None without a heartbeat row."""
    return tx.scalar(_SEEN_AT, {"host": host, "binary": binary})


def _touch_providers(tx: Connection, hosts: Iterable[str]) -> None:
    """Lock these hosts' providers, and set ``changed_at``, so that schedulers read them again."""
    found = tx.scalars(
        for_update(
            sa.select(providers.c.id)
            .where(providers.c.host.in_(sorted(hosts)))
            .order_by(providers.c.id)
        )
    ).all()
    tx.execute(sa.update(providers).where(providers.c.id.in_(found)).values(changed_at=now()))


@dataclass(frozen=True, slots=True)
class HostsHeard:
    """Numbers of compute hosts: ``known`` are up, ``heard`` of these have a recent heartbeat."""

    heard: int
    known: int

    @property
    def are_too_few(self) -> bool:
        """True if so many hosts are silent that the silence of a host proves nothing.

        Of fewer than ``FEW`` hosts that are up, one recent heartbeat is enough. Otherwise the share
        ``MOST`` of the hosts needs a recent heartbeat.
        """
        return self.heard < 1 if self.known < FEW else self.heard < MOST * self.known


def hosts_heard(tx: Connection, silence: int) -> HostsHeard:
    """Count the compute hosts that are up, and how many sent a heartbeat in ``silence`` seconds."""
    limit = now() - silence * SECOND
    heard, known = tx.execute(
        sa.select(
            sa.func.coalesce(sa.func.sum(sa.case((heartbeats.c.seen_at >= limit, 1), else_=0)), 0),
            sa.func.count(),
        ).where(heartbeats.c.binary == Binary.COMPUTE, heartbeats.c.up.is_(True))
    ).one()
    return HostsHeard(int(heard), int(known))


def judge(tx: Connection, silence: int) -> tuple[list[str], bool]:
    """Mark services as down after ``silence`` seconds without a heartbeat.

    Returns:
        The compute hosts that were up and are silent, and True if the result is doubtful. Each of
        these hosts is now marked as down, unless its heartbeat came during this call. Doubtful
        means that there are silent compute hosts, and ``HostsHeard.are_too_few``. Then the list is
        empty, and only other services are marked.
    """
    late = list(tx.execute(_LATE, {"silence": silence * SECOND}))
    if not late:
        return [], False
    limit = now() - silence * SECOND
    computes = [row.host for row in late if row.binary == Binary.COMPUTE]
    others = [row.host for row in late if row.binary != Binary.COMPUTE]
    doubtful = bool(computes) and hosts_heard(tx, silence).are_too_few
    if computes and not doubtful:
        tx.execute(
            sa.update(heartbeats)
            .where(
                heartbeats.c.binary == Binary.COMPUTE,
                heartbeats.c.host.in_(computes),
                heartbeats.c.seen_at < limit,
            )
            .values(up=False)
        )
        _touch_providers(tx, computes)
    if others:
        tx.execute(
            sa.update(heartbeats)
            .where(
                heartbeats.c.binary != Binary.COMPUTE,
                heartbeats.c.host.in_(others),
                heartbeats.c.seen_at < limit,
            )
            .values(up=False)
        )
    return ([] if doubtful else sorted(computes)), doubtful


def _select_services() -> sa.Select[Any]:
    return sa.select(services, heartbeats.c.seen_at, heartbeats.c.up).select_from(
        services.outerjoin(
            heartbeats,
            sa.and_(heartbeats.c.host == services.c.host, heartbeats.c.binary == services.c.binary),
        )
    )


def list_all(
    tx: Connection, host: str | None = None, binary: str | None = None
) -> list[HeardServiceRow]:
    """Return services in the order of their ids, with ``seen_at`` and ``up`` of the heartbeat.

    Both are None without a heartbeat row. ``host`` and ``binary`` restrict the services. None: all.
    """
    query = _select_services().order_by(services.c.id)
    if host is not None:
        query = query.where(services.c.host == host)
    if binary is not None:
        query = query.where(services.c.binary == binary)
    return list(tx.execute(query))


def show(
    tx: Connection, uuid: str | None = None, number: int | None = None
) -> HeardServiceRow | None:
    """Return a service by its id ``number`` if given, or else by its uuid.

    The result is None if the service does not exist.
    """
    return tx.execute(
        _select_services().where(
            services.c.uuid == uuid if number is None else services.c.id == number
        )
    ).first()


def remove(tx: Connection, row: ServiceRow) -> None:
    """Delete the row of a service and its heartbeat row.

    A running service inserts them again with its next heartbeat, and nova-compute when the host
    registers again. For nova-compute, callers use ``views.host_removal``, which also deletes the
    host.
    """
    _tell(tx, "service.delete", services.c.id == row.id)
    tx.execute(sa.delete(services).where(services.c.id == row.id))
    tx.execute(
        sa.delete(heartbeats).where(
            heartbeats.c.host == row.host, heartbeats.c.binary == row.binary
        )
    )


def lock(tx: Connection, host: str) -> None:
    """Lock the declared state of a host (disabled, forced down) until the transaction ends.

    A host without a compute service is ignored.
    """
    tx.execute(
        for_update(
            sa.select(services.c.id).where(
                services.c.host == host, services.c.binary == Binary.COMPUTE
            )
        )
    )


def fence(tx: Connection, host: str) -> None:
    """Record that the fencing hook turned the host off, and force the host down.

    The host is forced down until its agent registers again, or an admin changes that
    (``set_state``). A host that an admin forced down before stays so until an admin changes that.
    """
    tx.execute(
        sa.update(services)
        .where(
            services.c.host == host,
            services.c.binary == Binary.COMPUTE,
            sa.or_(services.c.forced_down.is_(False), services.c.fenced_at.is_not(None)),
        )
        .values(forced_down=True, fenced_at=now(), updated_at=now())
    )
    _tell(tx, "service.update", services.c.host == host, services.c.binary == Binary.COMPUTE)
    _touch_providers(tx, [host])


def record_return(tx: Connection, host: str) -> None:
    """End the fencing of a host that registers, which is then no longer forced down.

    A host that only an admin forced down stays forced down. The lock makes this wait for a fencing
    that is not committed yet.
    """
    lock(tx, host)
    back = tx.execute(
        sa.update(services)
        .where(
            services.c.host == host,
            services.c.binary == Binary.COMPUTE,
            services.c.fenced_at.is_not(None),
        )
        .values(forced_down=False, fenced_at=None, updated_at=now())
    )
    if back.rowcount:
        _tell(tx, "service.update", services.c.host == host, services.c.binary == Binary.COMPUTE)


def are_dead(tx: Connection, host: str, *, locked: bool = False) -> bool:
    """Return True if the host is forced down, so that its guests count as dead.

    An admin or a successful fencing forces a host down.

    Args:
        tx: The transaction.
        host: Name of the host.
        locked: Prevent a change until the end of the transaction.
    """
    query = sa.select(services.c.forced_down).where(
        services.c.host == host, services.c.binary == Binary.COMPUTE
    )
    return bool(tx.scalar(for_update(query) if locked else query))


def is_up(tx: Connection, host: str) -> bool:
    """Return True if the conductors count this compute host as up, and it is not forced down."""
    row = tx.execute(_select_compute(), {"at": host}).first()
    return row is not None and bool(row.up) and not row.forced_down


@cache
def _select_compute() -> sa.Select[Any]:
    return _select_services().where(
        services.c.host == sa.bindparam("at"), services.c.binary == Binary.COMPUTE
    )


def set_state(tx: Connection, uuid: str, **changes: object) -> None:
    """Change ``disabled``, ``disabled_reason`` or ``forced_down`` of a service.

    The provider of a compute host has the trait COMPUTE_STATUS_DISABLED afterwards exactly if the
    service is disabled. A change with ``forced_down`` also ends a fencing, whatever the value, so
    that the next registration of the host does not change ``forced_down``.

    Raises:
        NotFound: No service has this uuid.
        ValueError: ``changes`` contains another column.
    """
    unknown = set(changes) - {"disabled", "disabled_reason", "forced_down"}
    if unknown:
        raise ValueError(f"set_state cannot change these columns: {sorted(unknown)}")
    if not tx.execute(
        sa.update(services)
        .where(services.c.uuid == uuid)
        .values(
            **changes, **({"fenced_at": None} if "forced_down" in changes else {}), updated_at=now()
        )
    ).rowcount:
        raise errors.NotFound(f"Service {uuid} could not be found.")
    _tell(tx, "service.update", services.c.uuid == uuid)
    row = tx.execute(
        sa.select(services.c.host, services.c.binary).where(services.c.uuid == uuid)
    ).one()
    provider = tx.scalar(for_update(sa.select(providers.c.id).where(providers.c.host == row.host)))
    if row.binary == Binary.COMPUTE and provider is not None:
        _say_traits(tx, row.host, provider)


def traits(tx: Connection, host: str) -> list[str]:
    """Return [COMPUTE_STATUS_DISABLED] if the host's compute service is disabled, else []."""
    disabled = tx.scalar(
        sa.select(services.c.disabled).where(
            services.c.host == host, services.c.binary == Binary.COMPUTE
        )
    )
    return [COMPUTE_DISABLED] if disabled else []


def _say_traits(tx: Connection, host: str, provider: int) -> None:
    tx.execute(
        sa.delete(provider_traits).where(
            provider_traits.c.provider_id == provider, provider_traits.c.trait == COMPUTE_DISABLED
        )
    )
    for trait in traits(tx, host):
        tx.execute(
            sa.insert(provider_traits).values(provider_id=provider, trait=trait, by_hand=False)
        )
    tx.execute(
        sa.update(providers)
        .where(providers.c.id == provider)
        .values(generation=providers.c.generation + 1, changed_at=now())
    )
