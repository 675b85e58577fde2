# SPDX-License-Identifier: Apache-2.0
"""``kilonova explain``: why a server found no host, and whether such a server would find one now.

``explain SERVER`` reads what its last placement said from the journal, and asks a scheduler for the
same server again.
``explain --flavor F --image I …`` asks for one that nobody has made; nothing is made, claimed or
proposed. The request is made and checked where creates make theirs (``common.domain.request_spec``,
``compute_api``), so the answer is a user's. Status 0: so many would fit; 1: they would not; 2: an
option is wrong, and named; 3: whom to ask does not answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from oslo_config import cfg

from common.clients import image_checks
from common.domain import errors, hardware, ids, request_spec
from common.domain.clock import iso
from common.domain.json_types import JsonObject
from common.domain.models import Explanation, Flavor, ImageRef, RequestSpec
from common.domain.statuses import StepEvent
from common.domain.wire import from_wire
from common.service import config
from common.store import upgrades
from common.store.engine import Connection, Store
from common.store.rows import ServerRecord
from common.store.servers import actions, servers
from common.store.servers.servers import ServerFilters, loads
from common.store.tenants import flavors, server_groups
from deploy.operator.database import explain_silence
from deploy.operator.output import columns

if TYPE_CHECKING:
    from common.clients.image import Image

FITS, DOES_NOT, WRONG, UNKNOWN = range(4)
NAMED = 10  # hosts that are named one by one; all of them in --json
#: Options that describe a server which is not there.
_OF_A_NEW_ONE = ("flavor", "image", "zone", "host", "project", "group", "hint")


Ask = Callable[[RequestSpec], Explanation]


class WrongUse(Exception):
    """An option that cannot be; the text begins with its name."""


def explain(options: argparse.Namespace, ask: Ask | None = None) -> int:
    """Print the answer; ``ask`` instead of the broker's way to a scheduler."""
    conf = config.load(options.config)
    store = Store.opened(conf)
    upgrades.check(store)
    try:
        _check(options)
        placed = Placed(store, options.server) if options.server else None
        spec = placed.spec() if placed else _wanted(options, conf, store)
        if placed and not options.json:
            print(placed.text())
        found = (ask or _asker(conf))(spec)
        together = _together(store, spec)
    except WrongUse as problem:
        print(f"kilonova: {problem}", file=sys.stderr)
        return WRONG
    except errors.Unavailable as problem:
        print(f"kilonova: {explain_silence(options.config, problem)}", file=sys.stderr)
        return UNKNOWN
    finally:
        store.close()
    room = max(found.room.values(), default=0) if together else sum(found.room.values())
    if options.json:
        print(
            json.dumps(
                {
                    **({"server": placed.facts()} if placed else {}),
                    "count": options.count,
                    "fits": room >= options.count,
                    "request": _request(spec),
                    **asdict(found),
                },
                indent=1,
            )
        )
    else:
        print(text(spec, found, options.count, room, together))
    return FITS if room >= options.count else DOES_NOT


def _check(options: argparse.Namespace) -> None:
    given = [f"--{name}" for name in _OF_A_NEW_ONE if getattr(options, name)]
    if options.server and given:
        raise WrongUse(
            f"{given[0]}: a server that is there says that itself; leave SERVER out to ask for a new one"
        )
    if not options.server and not options.flavor:
        raise WrongUse("--flavor: say of which flavor, or name a SERVER that found no host")
    if options.count < 1:
        raise WrongUse("--count: at least 1")


def _asker(conf: cfg.ConfigOpts) -> Ask:
    """Asks whichever scheduler is free."""
    from common.rpc import scheduler
    from common.rpc.transport import Transport

    def ask(spec: RequestSpec) -> Explanation:
        transport = Transport(conf)
        try:
            return scheduler.SchedulerClient(transport).explain(spec)
        except errors.Unavailable as problem:
            raise errors.NoAnswer(
                "No scheduler answers, so nothing is known. See in kilonova status whether kilonova-scheduler is up; "
                "start it, or check [DEFAULT] transport_url and [database] url where it runs, then ask again."
            ) from problem
        finally:
            transport.close()

    return ask


# --- a server that is not there ---
@contextmanager
def _naming(option: str) -> Iterator[None]:
    """What is wrong with an option is said with its name."""
    try:
        yield
    except (errors.BadRequest, errors.NotFound) as problem:
        raise WrongUse(f"{option}: {problem.text}") from problem


def _wanted(options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store) -> RequestSpec:
    """The request that a create with these words would make."""
    from compute_api.compute.servers import destinations

    hints, project = _hints(options), options.project or ""
    with _naming("--zone"):
        where = destinations.parse(options.zone, conf.scheduler.default_schedule_zone)
    if options.host and where.forced:
        raise WrongUse("--host: --zone names a host already")
    default_zone = conf.scheduler.default_availability_zone
    with _naming("--zone"):
        where = store.read(lambda tx: destinations.resolve(tx, where, default_zone))
    if options.host:
        with _naming("--host"):
            where = store.read(
                lambda tx: destinations.resolve(
                    tx, destinations.Destination(where.zone, options.host), default_zone
                )
            )
    if hints.get("group"):
        with _naming("--group"):
            group = store.read(
                lambda tx: server_groups.show(tx, request_spec.group_of(hints) or "")
            )
        project = project or group.project_id
    with _naming("--flavor"):
        flavor = hardware.with_aliases(
            store.read(lambda tx: flavor_named(tx, options.flavor)), conf.api.pci_alias
        )
    image = None
    if options.image:
        with _naming("--image"):
            found = image_named(conf, options.image)
            image_checks.check_disk(found)
            image_checks.check_flavor(found, flavor)
            image = found.ref
    with _naming("--flavor, --image" if image else "--flavor"):
        image_checks.check_hardware(flavor, image.properties if image else {})
        return request_spec.of(
            ids.new(),
            project,
            flavor,
            image,
            hints=hints,
            availability_zone=where.zone,
            force_host=where.host if where.forced else None,
            requested_host=None if where.forced else where.host,
        )


def _hints(options: argparse.Namespace) -> JsonObject:
    """NAME=VALUE as the API takes it: a name that stands there several times is a list; --group is
    one of them."""
    from compute_api.compute.schemas.servers.servers import HINTS
    from compute_api.compute.servers.fields import check_hints
    from compute_api.http.validation import Schema

    hints: JsonObject = {}
    for one in options.hint:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise WrongUse(f"--hint: {one!r} is not NAME=VALUE")
        hints[name] = value if name not in hints else [*_listed(hints[name]), value]
    with _naming("--hint"):
        Schema(HINTS).check(hints)
        check_hints(hints)
    if options.group:
        with _naming("--group"):
            Schema(HINTS).check({"group": options.group})
        hints["group"] = options.group
    return hints


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def flavor_named(tx: Connection, name: str) -> Flavor:
    """A flavor by its id, else by its name. Raises NotFound."""
    try:
        return flavors.record(flavors.show(tx, name))
    except errors.NotFound:
        for row in flavors.page(tx, project_id=None, limit=100_000):
            if row.name == name:
                return flavors.record(row)
        raise


def image_named(conf: cfg.ConfigOpts, name: str) -> Image:
    """An image by its id, else by its name, as Kilonova's own user sees it. Raises BadRequest."""
    from common.clients.identity import READ, IdentityClient
    from common.clients.image import ACTIVE, ImageClient

    identity = IdentityClient(conf, READ)
    client = ImageClient(identity.image_url)
    token = identity.token()
    if not ids.is_uuid(name):
        found = [image["id"] for image in client.find({"name": name, "status": ACTIVE}, token)]
        if len(found) != 1:
            raise errors.BadRequest(
                f"there {'is' if not found else 'are'} {len(found) or 'no'} "
                f"image{'s' * (len(found) > 1)} of the name {name}; give its id"
            )
        name = found[0]
    return client.show(name, token)


# --- a server that is there ---
class Placed:
    """A server and the journal of the action that placed it, or tried to, last."""

    def __init__(self, store: Store, name: str) -> None:
        self.server = store.read(lambda tx: _server(tx, name))
        self.action, self.events = store.read(lambda tx: _placement(tx, self.server.id))

    def spec(self) -> RequestSpec:
        """The request that its placement made, or would make."""
        server, args = self.server, self.action.args if self.action is not None else {}
        image = from_wire(ImageRef, loads(server.image)) if server.image else None
        host, forced = args.get("host"), bool(args.get("forced"))
        with _naming(f"server {server.id}"):
            return request_spec.of(
                server.id,
                server.project_id,
                from_wire(Flavor, loads(server.flavor)),
                image,
                hints=loads(server.scheduler_hints),
                availability_zone=server.pinned_availability_zone,
                force_host=host if forced else None,
                requested_host=None if forced else host,
            )

    def facts(self) -> JsonObject:
        """For --json."""
        said = [
            {
                "step": event.step,
                "attempt": event.attempt,
                "host": event.host,
                "message": event.message,
                "details": event.details,
                "at": iso(event.at),
            }
            for event in self.events
        ]
        return {
            "id": self.server.id,
            "name": self.server.name,
            "project_id": self.server.project_id,
            "vm_state": self.server.vm_state,
            "host": self.server.host,
            "action": self.action.name if self.action is not None else None,
            "request_id": self.action.request_id if self.action is not None else None,
            "failures": said,
        }

    def text(self) -> str:
        """What happened, as far as something went wrong."""
        server, action = self.server, self.action
        lines = [
            f"server {server.id} ({server.name}) of project {server.project_id}: {server.vm_state}, "
            + (f"on {server.host}" if server.host else "on no host")
        ]
        if action is None:
            lines.append("nothing has placed it yet")
        elif not self.events:
            lines.append(
                f"{action.name} of {iso(action.created_at)} ({action.request_id}): no step failed"
            )
        else:
            lines.append(f"{action.name} of {iso(action.created_at)} ({action.request_id}):")
        for event in self.events:
            lines.append(
                f"  {event.step}, attempt {event.attempt}{f', on {event.host}' if event.host else ''}: "
                f"{event.message or 'failed'}"
            )
            lines += [f"      {line}" for line in (event.details or "").splitlines()]
        return "\n".join([*lines, "", "a server like it now:"])


def _server(tx: Connection, name: str) -> ServerRecord:
    """By its id, also one that was deleted; else by its name, if only one has it."""
    if ids.is_uuid(name):
        with _naming("SERVER"):
            return servers.show(tx, name, deleted=True)
    found = servers.page(tx, ServerFilters(filters={"name": [name]}, limit=2), names_only=True)
    if len(found) != 1:
        raise WrongUse(
            f"SERVER: there {'are several servers' if found else 'is no server'} of the name {name}; give "
            "its id"
        )
    return servers.show(tx, found[0].id)


def _placement(tx: Connection, server_id: str) -> tuple[Any, list[Any]]:
    """The newest action that looked for a host, and the steps of it that failed."""
    for row in actions.list_for(tx, server_id, limit=100):
        events = actions.events_of(tx, row.id)
        if any(event.step == "place" for event in events):
            return row, [
                event
                for event in events
                if event.event in (StepEvent.FAILED, StepEvent.UNDO_FAILED)
            ]
    return None, []


# --- the answer ---
def _request(spec: RequestSpec) -> JsonObject:
    """What was asked, without what only says who asked."""
    return {
        "flavor": spec.flavor.name if spec.flavor else None,
        "image": spec.image_id,
        "resources": spec.resources,
        "required_traits": spec.required_traits,
        "forbidden_traits": spec.forbidden_traits,
        "availability_zone": spec.availability_zone,
        "host": spec.force_host or spec.requested_host,
        "forced": spec.force_host is not None,
        "group": spec.group,
        "hints": spec.hints,
    }


def _together(store: Store, spec: RequestSpec) -> bool:
    """Must all servers of the request share one host? Then the zone with the most room counts, not
    all of them."""
    try:
        return spec.group is not None and bool(
            store.read(lambda tx: server_groups.show(tx, spec.group or "")).policy == "affinity"
        )
    except errors.NotFound:  # deleted since: it binds nobody
        return False


def text(spec: RequestSpec, found: Explanation, count: int, room: int, together: bool) -> str:
    """The answer for people."""
    lines = [
        "needs "
        + ", ".join(
            [f"{amount} {name}" for name, amount in sorted(spec.resources.items())]
            + spec.required_traits
            + [f"not {name}" for name in spec.forbidden_traits]
        )
    ]
    lines.append(f"{found.total} hosts, {found.passing} of them can take one")
    lines += [f"  {row['hosts']:>5}  {row['text']}" for row in found.removed]
    lines += [f"         {name}: {why}" for name, why in sorted(found.by_host.items())[:NAMED]]
    if len(found.by_host) > NAMED:
        lines.append(f"         and {len(found.by_host) - NAMED} more: --json names all")
    lines.append(
        f"room for {room} more{' on one host' * together}" + (", by zone:" if room else "")
    )
    if room:
        lines.append(
            columns([["", zone, str(number)] for zone, number in sorted(found.room.items())])
        )
        lines.append("best first: " + ", ".join(found.hosts[:NAMED]))
    lines.append(f"{count} of them: {'yes' if room >= count else 'no'}")
    return "\n".join(lines)
