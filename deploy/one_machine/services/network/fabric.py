# SPDX-License-Identifier: Apache-2.0
"""Writing transactions: a `Change` is one, with what it means for hosts and servers.

Code that changes rows says what is touched (networks, groups, hosts) and which events the compute
service gets; at the end the hosts concerned get a new revision, in the same transaction. After the
commit waiting requests are woken. What must stay true: everything that a host or the compute
service must know follows from committed rows.
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
    """What the operator chose."""

    has_hosts: bool = True
    dns: tuple[str, ...] = ()
    first_vni: int = 1
    mtu: int = 1450
    wait_seconds: float = 2.0
    """How long the request that makes a port waits for its host."""
    host_secret: str = field(default="", repr=False)
    """Shared with the metadata service; each host's key follows from it. None is
    believed without it."""


class Fabric:
    """The database, the hosts and the settings: what every resource works on."""

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
            known = {row.name: row.changed for row in connection.execute(select(schema.hosts))}
        self.hosts = HostRegistry(known, monotonic)
        self.has_events = threading.Event()
        """Set when there are events for the compute service."""

    @contextmanager
    def change(self) -> Iterator["Change"]:
        """A writing transaction; hosts that it concerns and requests that wait are woken when it
        has committed."""
        with self.database.write() as connection:
            change = Change(connection, self)
            yield change
            touched = change.finish()
        self.hosts.set_revisions(touched)
        if change.has_events:
            self.has_events.set()

    def settle(self, change: "Change") -> None:
        """Wait, but not for long, until the hosts have wired what `change` bound to them."""
        if change.bound:
            self.hosts.await_acknowledged(change.bound, self.settings.wait_seconds)


@dataclass
class Change(Transaction):
    """A transaction under way, with what it means for hosts and servers."""

    fabric: Fabric
    bound: dict[str, int] = field(default_factory=dict)
    has_events: bool = False
    _revision: int = 0
    _networks: set[str] = field(default_factory=set)
    _groups: set[str] = field(default_factory=set)
    _hosts: set[str] = field(default_factory=set)

    def revision(self) -> int:
        """The number of this change, higher than every one before."""
        if not self._revision:
            number = schema.counter.c.revision
            higher = update(schema.counter).values(revision=number + 1)
            self._revision = self.scalar(higher.returning(number))
        return self._revision

    def touch(
        self, *, networks: Iterable[str] = (), groups: Iterable[str] = (), hosts: Iterable[str] = ()
    ) -> None:
        """What is no longer as hosts know it: all hosts with ports of these networks or groups, and
        these hosts."""
        self._networks.update(networks)
        self._groups.update(groups)
        self._hosts.update(name for name in hosts if name)

    def add_event(self, name: str, server: str, tag: str | None, status: str = "completed") -> None:
        """Store an event for the compute service."""
        self.has_events = True
        event = {"name": name, "server": server, "tag": tag, "status": status}
        self.execute(insert(schema.events).values(event | {"created": int(time.time())}))

    def finish(self) -> dict[str, int]:
        """Give the hosts that this change concerns its revision: which hosts, and their
        revision."""
        if not self.fabric.settings.has_hosts or not (
            self._networks or self._groups or self._hosts
        ):
            return {}
        hosts, places, grouped = schema.hosts.c, schema.PLACES.c, schema.port_groups.c
        concerned: list[ColumnElement[bool]] = [hosts.name.in_(self._hosts)]
        if self._networks:
            touched = schema.networks.c.id.in_(self._networks)
            external = select(schema.networks.c.id).where(touched, schema.networks.c.external)
            there = select(places.host).where(places.network_id.in_(self._networks))
            concerned += [hosts.external_gateway & external.exists(), hosts.name.in_(there)]
        if self._groups:
            rules = schema.security_group_rules.c
            named = select(rules.security_group_id).where(rules.remote_group_id.in_(self._groups))
            met = or_(grouped.group_id.in_(self._groups), grouped.group_id.in_(named))
            there = select(places.host).join(schema.port_groups, grouped.port_id == places.port_id)
            concerned.append(hosts.name.in_(there.where(met)))
        changed = update(schema.hosts).where(or_(*concerned)).values(changed=self.revision())
        names = self.scalars(changed.returning(hosts.name))
        return dict.fromkeys(names, self.revision())

    def add(self, table: Table, values: DbValues) -> str:
        """Store a new thing and return its id."""
        now = moment()
        row = {"id": str(uuid.uuid4()), "created_at": now, "updated_at": now} | dict(values)
        self.execute(insert(table).values(row))
        return str(row["id"])

    def set(self, table: Table, key: str, values: DbValues) -> None:
        """Change columns of a thing; its revision number rises."""
        risen = {"updated_at": moment(), "revision_number": table.c.revision_number + 1}
        self.execute(update(table).where(table.c.id == key).values(dict(values) | risen))
