# SPDX-License-Identifier: Apache-2.0
"""Remedies of findings about hosts, external services and duties. Called by ``remedies.mend``."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from common.domain import errors
from common.domain.service_binaries import Binary
from common.store import cleanups
from common.store.engine import now
from common.store.hosts import services
from common.store.schema import (
    aggregate_hosts,
    allocations,
    heartbeats,
    host_actions,
    hosts,
    inventories,
    leases,
    provider_aggregates,
    provider_traits,
    providers,
)
from common.store.schema import services as services_table
from deploy.operator.doctor.finding import Finding


def _set_trait(tx: Connection, finding: Finding) -> None:
    """Write the present state of the service again, which also sets the provider's trait.

    Raises:
        Conflict: The host has no service.
    """
    uuid = tx.scalar(
        sa.select(services_table.c.uuid).where(
            services_table.c.host == finding.subject, services_table.c.binary == Binary.COMPUTE
        )
    )
    if uuid is None:
        raise errors.Conflict(
            f"Host {finding.subject} has no service. Repair the finding host-without-service of this host first."
        )
    services.set_state(tx, uuid)


def _remove_membership(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.delete(aggregate_hosts).where(
            aggregate_hosts.c.host == finding.subject,
            aggregate_hosts.c.aggregate_id == int(finding.facts[0]),
        )
    )


def _enrol_service(tx: Connection, finding: Finding) -> None:
    services.enrol(tx, finding.subject, Binary.COMPUTE)


def _register_again(tx: Connection, finding: Finding) -> None:
    """End the host's session. The host then registers at its next exchange, with its inventory."""
    tx.execute(sa.update(hosts).where(hosts.c.name == finding.subject).values(session=0))


def _remove_provider(tx: Connection, finding: Finding) -> None:
    number = int(finding.facts[0])
    tx.execute(sa.select(providers.c.id).where(providers.c.id == number).with_for_update())
    if tx.scalar(sa.select(allocations.c.used).where(allocations.c.provider_id == number).limit(1)):
        raise errors.Conflict(
            f"Consumers hold resources of provider {finding.subject}. Repair the findings about these allocations "
            "first, or start the host's agent again."
        )
    for table in (inventories, provider_traits, provider_aggregates):
        tx.execute(sa.delete(table).where(table.c.provider_id == number))
    tx.execute(sa.delete(providers).where(providers.c.id == number))


def _set_seen(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.update(heartbeats)
        .where(heartbeats.c.host == finding.subject, heartbeats.c.binary == finding.facts[0])
        .values(seen_at=now())
    )


def _end_host_action_lease(tx: Connection, finding: Finding) -> None:
    tx.execute(
        sa.update(host_actions)
        .where(host_actions.c.id == finding.facts[0], host_actions.c.open_host.is_not(None))
        .values(locked_by=None, locked_until=0)
    )


def _hasten(tx: Connection, finding: Finding) -> None:
    cleanups.hasten(tx, int(finding.facts[0]))


def _end_duty(tx: Connection, finding: Finding) -> None:
    tx.execute(sa.update(leases).where(leases.c.name == finding.subject).values(until=now()))


# --- pending cleanups for external services ---
def _request_port(tx: Connection, finding: Finding) -> None:
    cleanups.ask(tx, cleanups.PORT, finding.subject, finding.facts[0])


def _request_binding(tx: Connection, finding: Finding) -> None:
    server, *hosts_bound = finding.facts
    for host in hosts_bound:
        cleanups.ask(tx, cleanups.BINDING, finding.subject, server, host)


def _request_image(tx: Connection, finding: Finding) -> None:
    cleanups.ask(tx, cleanups.IMAGE, finding.subject, finding.facts[0])


HOSTS: dict[str, Callable[[Connection, Finding], None]] = {
    "disabled-trait": _set_trait,
    "aggregate-host": _remove_membership,
    "host-without-service": _enrol_service,
    "host-without-provider": _register_again,
    "provider-without-host": _remove_provider,
    "heartbeat": _set_seen,
    "host-action-lease": _end_host_action_lease,
    "cleanup": _hasten,
    "duty": _end_duty,
    "port-of-nobody": _request_port,
    "port-elsewhere": _request_port,
    "port-twice": _request_binding,
    "image-in-transit": _request_image,
}
