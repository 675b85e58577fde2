# SPDX-License-Identifier: Apache-2.0
"""Tells the compute service what happened to its servers' ports: the oldest committed events first, until it took them.

`tell` is one round, called again and again by the service's thread. Events that the compute service refuses for good
(it does not know the server any more) are dropped; while it is away they wait, for an hour at most.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from keystoneauth1 import exceptions
from keystoneauth1.identity import v3
from keystoneauth1.session import Session
from sqlalchemy import Row, delete, select

from deploy.standalone.network.fabric import Fabric
from deploy.standalone.network.schema import events

LOG = logging.getLogger("standalone.network")
AT_ONCE, KEEP_SECONDS, TIMEOUT_SECONDS = 100, 3600, 10
Event = dict[str, str]


class Listener(Protocol):
    """Who is told."""

    def take(self, told: Sequence[Event]) -> bool:
        """Were the events taken, or refused for good? False: try again later."""


class Compute:
    """The compute service, found in the catalogue or at a fixed URL."""

    def __init__(self, identity: Mapping[str, Any], url: str | None) -> None:
        names = ("auth_url", "username", "password", "project_name")
        plugin = v3.Password(user_domain_id="default", project_domain_id="default",
                             **{name: identity[name] for name in names})
        self._session, self._url = Session(auth=plugin, timeout=TIMEOUT_SECONDS), url

    def take(self, told: Sequence[Event]) -> bool:
        try:
            url = self._url or self._session.get_endpoint(service_type="compute")
            if not url:
                LOG.warning("The catalogue names no compute service: give --compute-url.")
                return False
            answer = self._session.post(f"{url.rstrip('/')}/os-server-external-events", json={"events": list(told)},
                                        raise_exc=False)
        except exceptions.ClientException as error:
            LOG.warning("Cannot tell the compute service of %d events: %s", len(told), type(error).__name__)
            return False
        if answer.status_code in (401, 403, 408, 423, 425, 429) or answer.status_code >= 500:
            LOG.warning("The compute service answered %d to %d events.", answer.status_code, len(told))
            return False
        if answer.status_code not in (200, 207, 404, 422):
            LOG.error("The compute service refuses %d events (%d): %s", len(told), answer.status_code,
                      answer.text[:200])
        return True


def tell(fabric: Fabric, listener: Listener, now: Callable[[], float] = time.time) -> bool:
    """Hand over all events, the oldest first; False when some were not taken."""
    while rows := _oldest(fabric):
        if not _hand_over(rows, listener, now):
            return False
        with fabric.database.write() as connection:
            connection.execute(delete(events).where(events.c.id <= rows[-1].id))
    return True


def _oldest(fabric: Fabric) -> Sequence[Row[Any]]:
    with fabric.database.read() as connection:
        return connection.execute(select(events).order_by(events.c.id).limit(AT_ONCE)).all()


def _hand_over(rows: Sequence[Row[Any]], listener: Listener, now: Callable[[], float]) -> bool:
    fresh = [row for row in rows if row.created > now() - KEEP_SECONDS]
    if len(fresh) < len(rows):
        LOG.error("Dropped %d events that the compute service did not take for an hour.", len(rows) - len(fresh))
    told = [{"name": row.name, "server_uuid": row.server, "status": row.status} |
            ({"tag": row.tag} if row.tag else {}) for row in fresh]
    # The same event twice says no more than its last one: what is told is "look again", never what there is to see.
    last = {tuple(sorted(event.items())): place for place, event in enumerate(told)}
    return not fresh or listener.take([told[place] for place in sorted(last.values())])
