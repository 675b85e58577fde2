# SPDX-License-Identifier: Apache-2.0
"""Writing transactions, with their effects on hosts and servers.

Code that changes rows calls `touch` for the networks, groups and hosts concerned, and `add_event`
for the compute service. At the end the hosts concerned get a new revision in the same transaction.
After the commit, the waiting requests of these hosts are answered. Invariant: the data for hosts
and the compute service follow from committed rows.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Table, insert, or_, select, update
from sqlalchemy.dialects.sqlite import insert as insert_or

from deploy.one_machine.services.database import Database, DbValues
from deploy.one_machine.services.network import schema
from deploy.one_machine.services.network.hosts import HostRegistry
from deploy.one_machine.services.resource import Transaction, moment


@dataclass(frozen=True)
class NetworkSettings:
    """Settings from the command line."""

    has_hosts: bool = True
    dns: tuple[str, ...] = ()
    first_vni: int = 1
    mtu: int = 1450
    wait_seconds: float = 2.0
    """How long a request that creates a port waits for its host."""
    host_secret: str = field(default="", repr=False)
    """The secret shared with the metadata service, from which the hosts' keys follow. Without it no
    host is accepted."""


class Fabric:
    """The service object of all resources: the database, the hosts and the settings."""

    def __init__(
        self,
        database: Database,
        settings: NetworkSettings | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database, self.settings = database, settings or NetworkSettings()
        with database.write() as connection:
            connection.execute(
                insert_or(schema.counter).values(id=1, revision=0).on_conflict_do_nothing()
            )
            revisions = {row.name: row.changed for row in connection.execute(select(schema.hosts))}
        self.hosts = HostRegistry(revisions, monotonic)
        self.has_events = threading.Event()
        """Set when there are events for the compute service."""

    @contextmanager
    def change(self) -> Iterator["Change"]:
        """Yield a writing transaction, which commits if the block succeeds.

        After the commit, the waiting requests of the concerned hosts are answered, and the thread
        for events is woken.
        """
        with self.database.write() as connection:
            change = Change(connection, self)
            yield change
            touched = change.finish()
        self.hosts.set_revisions(touched)
        if change.has_events:
            self.has_events.set()

    def settle(self, change: "Change") -> None:
        """Wait until the hosts have applied the bindings of `change`, up to `wait_seconds`.

        A timeout is no error. The ports are then still DOWN, as is a port that a host cannot wire.
        """
        if change.bound:
            self.hosts.await_acknowledged(change.bound, self.settings.wait_seconds)


@dataclass
class Change(Transaction):
    """An open transaction, with its effects on hosts and servers.

    Attributes:
        fabric: The service object.
        bound: Host -> the revision with which the host has wired the ports bound to it.
        has_events: True if there are new events for the compute service.
    """

    fabric: Fabric
    bound: dict[str, int] = field(default_factory=dict)
    has_events: bool = False
    _revision: int = 0
    _networks: set[str] = field(default_factory=set)
    _groups: set[str] = field(default_factory=set)
    _hosts: set[str] = field(default_factory=set)

    def revision(self) -> int:
        """Return the revision of this change, which is higher than those of earlier changes.

        All calls in one transaction return the same number.
        """
        if not self._revision:
            number = schema.counter.c.revision
            statement = update(schema.counter).values(revision=number + 1)
            self._revision = self.scalar(statement.returning(number))
        return self._revision

    def touch(
        self, *, networks: Iterable[str] = (), groups: Iterable[str] = (), hosts: Iterable[str] = ()
    ) -> None:
        """Record that the descriptions of hosts change. `finish` gives them a new revision.

        `finish` looks for ports, so a removed port does not count. Its host must be in `hosts`.

        Args:
            networks: Networks. All hosts with ports in them are concerned, and for an external
                network also the hosts that are gateways of external networks.
            groups: Security groups. All hosts with ports in them, or in groups whose rules refer to
                them, are concerned.
            hosts: Names of hosts. "" is ignored.
        """
        self._networks.update(networks)
        self._groups.update(groups)
        self._hosts.update(name for name in hosts if name)

    def add_event(self, name: str, server: str, tag: str | None, status: str = "completed") -> None:
        """Insert an event for the compute service, which the background thread sends.

        Args:
            name: The name in Nova's API, for example "network-changed".
            server: The id of the server.
            tag: The id of the port, or None.
            status: "completed" or "failed".
        """
        self.has_events = True
        event = {"name": name, "server": server, "tag": tag, "status": status}
        self.execute(insert(schema.events).values(event | {"created": int(time.time())}))

    def finish(self) -> dict[str, int]:
        """Store the new revision of the hosts concerned, and return host -> revision.

        The result is empty if no host is concerned, or if the cloud has no hosts.
        """
        if not self.fabric.settings.has_hosts or not (
            self._networks or self._groups or self._hosts
        ):
            return {}
        hosts, places, groups = schema.hosts.c, schema.PLACES.c, schema.port_groups.c
        concerned: list[ColumnElement[bool]] = [hosts.name.in_(self._hosts)]
        if self._networks:
            touched = schema.networks.c.id.in_(self._networks)
            external = select(schema.networks.c.id).where(touched, schema.networks.c.external)
            there = select(places.host).where(places.network_id.in_(self._networks))
            concerned += [hosts.external_gateway & external.exists(), hosts.name.in_(there)]
        if self._groups:
            rules = schema.security_group_rules.c
            named = select(rules.security_group_id).where(rules.remote_group_id.in_(self._groups))
            met = or_(groups.group_id.in_(self._groups), groups.group_id.in_(named))
            there = select(places.host).join(schema.port_groups, groups.port_id == places.port_id)
            concerned.append(hosts.name.in_(there.where(met)))
        changed = update(schema.hosts).where(or_(*concerned)).values(changed=self.revision())
        names = self.scalars(changed.returning(hosts.name))
        return dict.fromkeys(names, self.revision())

    def add(self, table: Table, values: DbValues) -> str:
        """Insert a row of the API and return the id.

        Values override the default id (a random UUID) and the default times (now).
        """
        now = moment()
        row = {"id": str(uuid.uuid4()), "created_at": now, "updated_at": now} | dict(values)
        self.execute(insert(table).values(row))
        return str(row["id"])

    def set(self, table: Table, key: str, values: DbValues) -> None:
        """Change columns of a row, set the time of the update and increase the revision number."""
        automatic = {"updated_at": moment(), "revision_number": table.c.revision_number + 1}
        self.execute(update(table).where(table.c.id == key).values(dict(values) | automatic))
