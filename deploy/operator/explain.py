# SPDX-License-Identifier: Apache-2.0
"""``kilonova explain``: why a server found no host, and whether such a server would find one now.

``explain SERVER`` reads the failures of the server's last placement from the journal, and sends the
same request to a scheduler again. ``explain --flavor F --image I …`` sends a request for a server
that does not exist. Neither changes anything. Requests are built and checked by the same code as
those of creates (``common.domain.request_spec``, ``compute_api``), so a user would get the same
answer.

Status 0: so many servers would fit. 1: they would not fit. 2: an option is wrong, and the message
names it. 3: scheduler or database do not answer.
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
# The number of hosts in the text. --json lists all.
NAMED = 10
#: Options that describe a server that does not exist.
_NEW_SERVER_OPTIONS = ("flavor", "image", "zone", "host", "project", "group", "hint")


Ask = Callable[[RequestSpec], Explanation]


class WrongUse(Exception):
    """An option is wrong. The text begins with the name of the option."""


def explain(options: argparse.Namespace, ask: Ask | None = None) -> int:
    """Print why SERVER, if given, found no host, and whether such servers would find hosts now.

    Args:
        options: The command line.
        ask: Replaces the request to a scheduler. None: send the request.

    Returns:
        0 if ``--count`` servers fit, 1 if not, 2 if an option is wrong, 3 if the scheduler, the
        database or an external service does not answer.

    Raises:
        Problem: The database has another version.
    """
    conf = config.load(options.config)
    store = Store.open(conf)
    try:
        upgrades.check(store)
        _check(options)
        placed = Placed(store, options.server) if options.server else None
        spec = placed.spec() if placed else _build_spec(options, conf, store)
        if placed and not options.json:
            print(placed.text())
        explanation = (ask or _scheduler_client(conf))(spec)
        together = _together(store, spec)
    except WrongUse as problem:
        print(f"kilonova: {problem}", file=sys.stderr)
        return WRONG
    except errors.Unavailable as problem:
        print(f"kilonova: {explain_silence(options.config, problem)}", file=sys.stderr)
        return UNKNOWN
    finally:
        store.close()
    room = max(explanation.room.values(), default=0) if together else sum(explanation.room.values())
    if options.json:
        print(
            json.dumps(
                {
                    **({"server": placed.facts()} if placed else {}),
                    "count": options.count,
                    "fits": room >= options.count,
                    "request": _request(spec),
                    **asdict(explanation),
                },
                indent=1,
            )
        )
    else:
        print(text(spec, explanation, options.count, room, together))
    return FITS if room >= options.count else DOES_NOT


def _check(options: argparse.Namespace) -> None:
    new_server_options = [f"--{name}" for name in _NEW_SERVER_OPTIONS if getattr(options, name)]
    if options.server and new_server_options:
        raise WrongUse(
            f"{new_server_options[0]}: this option describes a new server and cannot be combined with SERVER; "
            "leave one of the two out"
        )
    if not options.server and not options.flavor:
        raise WrongUse("--flavor: give the flavor of a new server, or a SERVER that found no host")
    if options.count < 1:
        raise WrongUse("--count: the number must be at least 1")


def _scheduler_client(conf: cfg.ConfigOpts) -> Ask:
    """Return a function that sends a request spec to a scheduler and returns the explanation.

    The function raises NoAnswer if no scheduler answers, or if the scheduler's database does not.
    """
    from common.rpc import scheduler
    from common.rpc.transport import Transport

    def ask(spec: RequestSpec) -> Explanation:
        transport = Transport(conf)
        try:
            return scheduler.SchedulerClient(transport).explain(spec)
        except errors.Unavailable as problem:
            raise errors.NoAnswer(
                "No scheduler answers. See in kilonova status whether a kilonova-scheduler is up. Start it, or "
                "check [DEFAULT] transport_url and [database] url where it runs, then repeat the command."
            ) from problem
        finally:
            transport.close()

    return ask


# --- a server that does not exist ---
@contextmanager
def _errors_name(option: str) -> Iterator[None]:
    """Turn BadRequest and NotFound raised in the block into WrongUse with the option's name."""
    try:
        yield
    except (errors.BadRequest, errors.NotFound) as problem:
        raise WrongUse(f"{option}: {problem.text}") from problem


def _build_spec(options: argparse.Namespace, conf: cfg.ConfigOpts, store: Store) -> RequestSpec:
    """Return the request spec that a create with these options would have.

    Raises:
        WrongUse: The API would refuse the value of an option, or options contradict each other.
        Unavailable: The database, the identity service or the image service does not answer.
    """
    from compute_api.compute.servers import destinations

    hints, project = _hints(options), options.project or ""
    with _errors_name("--zone"):
        destination = destinations.parse(options.zone, conf.scheduler.default_schedule_zone)
    if options.host and destination.forced:
        raise WrongUse("--host: --zone already names a host; leave one of the two out")
    default_zone = conf.scheduler.default_availability_zone
    with _errors_name("--zone"):
        destination = store.read(lambda tx: destinations.resolve(tx, destination, default_zone))
    if options.host:
        with _errors_name("--host"):
            destination = store.read(
                lambda tx: destinations.resolve(
                    tx, destinations.Destination(destination.zone, options.host), default_zone
                )
            )
    if hints.get("group"):
        with _errors_name("--group"):
            group = store.read(
                lambda tx: server_groups.show(tx, request_spec.group_of(hints) or "")
            )
        project = project or group.project_id
    with _errors_name("--flavor"):
        flavor = hardware.with_aliases(
            store.read(lambda tx: flavor_named(tx, options.flavor)), conf.api.pci_alias
        )
    image = None
    if options.image:
        with _errors_name("--image"):
            image_record = image_named(conf, options.image)
            image_checks.check_disk(image_record)
            image_checks.check_flavor(image_record, flavor)
            image = image_record.ref
    with _errors_name("--flavor, --image" if image else "--flavor"):
        image_checks.check_hardware(flavor, image.properties if image else {})
        return request_spec.of(
            ids.new(),
            project,
            flavor,
            image,
            hints=hints,
            availability_zone=destination.zone,
            force_host=destination.host if destination.forced else None,
            requested_host=None if destination.forced else destination.host,
        )


def _hints(options: argparse.Namespace) -> JsonObject:
    """Return the scheduler hints in the form of the API.

    The values of a name that occurs several times become a list. ``--group`` becomes the hint
    ``group``.

    Raises:
        WrongUse: A hint is invalid.
    """
    from compute_api.compute.schemas.servers.servers import HINTS
    from compute_api.compute.servers.fields import check_hints
    from compute_api.http.validation import Schema

    hints: JsonObject = {}
    for hint in options.hint:
        name, equals, value = hint.partition("=")
        if not name or not equals:
            raise WrongUse(f"--hint: {hint!r} is not NAME=VALUE")
        hints[name] = value if name not in hints else [*_as_list(hints[name]), value]
    with _errors_name("--hint"):
        Schema(HINTS).check(hints)
        check_hints(hints)
    if options.group:
        with _errors_name("--group"):
            Schema(HINTS).check({"group": options.group})
        hints["group"] = options.group
    return hints


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def flavor_named(tx: Connection, name: str) -> Flavor:
    """Return the flavor with this id, otherwise with this name.

    Raises:
        NotFound: There is no such flavor.
    """
    try:
        return flavors.record(flavors.show(tx, name))
    except errors.NotFound:
        for row in flavors.page(tx, project_id=None, limit=100_000):
            if row.name == name:
                return flavors.record(row)
        raise


def image_named(conf: cfg.ConfigOpts, name: str) -> Image:
    """Return the image with this id, otherwise the active image with this name.

    The image service is queried as Kilonova's own user.

    Raises:
        BadRequest: No active image or several active images have this name.
        NotFound: No image has this id.
        Unavailable: The identity service or the image service does not answer.
    """
    from common.clients.identity import READ, IdentityClient
    from common.clients.image import ACTIVE, ImageClient

    identity = IdentityClient(conf, READ)
    client = ImageClient(identity.image_url)
    token = identity.token()
    if not ids.is_uuid(name):
        image_ids = [image["id"] for image in client.find({"name": name, "status": ACTIVE}, token)]
        if len(image_ids) != 1:
            raise errors.BadRequest(
                f"{len(image_ids) or 'no'} active image{'s' * (len(image_ids) > 1)} "
                f"{'have' if image_ids else 'has'} the name {name}; give the id of the image"
            )
        name = image_ids[0]
    return client.show(name, token)


# --- an existing server ---
class Placed:
    """An existing server, and the failed steps of its newest action with a placement.

    ``action`` is None if none of the server's newest 100 actions has a placement.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.server = store.read(lambda tx: _server(tx, name))
        self.action, self.events = store.read(lambda tx: _placement(tx, self.server.id))

    def spec(self) -> RequestSpec:
        """Return the request spec of the server's placement, from its record and its action.

        Raises:
            WrongUse: The stored flavor or image is refused now.
        """
        server, args = self.server, self.action.args if self.action is not None else {}
        image = from_wire(ImageRef, loads(server.image)) if server.image else None
        host, forced = args.get("host"), bool(args.get("forced"))
        with _errors_name(f"server {server.id}"):
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
        """Return the server, and the newest placement action with failed steps, for JSON output."""
        failures = [
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
            "failures": failures,
        }

    def text(self) -> str:
        """Return the server and its newest placement action with its failed steps, as printed text.

        The last line is the heading of the explanation, which the caller prints next.
        """
        server, action = self.server, self.action
        lines = [
            f"server {server.id} ({server.name}) of project {server.project_id}: {server.vm_state}, "
            + (f"on {server.host}" if server.host else "on no host")
        ]
        if action is None:
            lines.append("no action has placed the server yet")
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
    """Return the server with this id, even if deleted, or the only existing server with this name.

    Raises:
        WrongUse: There is no such server, or several servers have this name.
    """
    if ids.is_uuid(name):
        with _errors_name("SERVER"):
            return servers.show(tx, name, deleted=True)
    matches = servers.page(tx, ServerFilters(filters={"name": [name]}, limit=2), names_only=True)
    if len(matches) != 1:
        raise WrongUse(
            f"SERVER: {'several servers have' if matches else 'no server has'} the name {name}; give the id of the "
            "server"
        )
    return servers.show(tx, matches[0].id)


def _placement(tx: Connection, server_id: str) -> tuple[Any, list[Any]]:
    """Return the server's newest action with a step "place", and all failed steps of this action.

    Return (None, []) if the newest 100 actions have no such step.
    """
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
    """Return the request spec for JSON output, without project and user."""
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
    """Return True if the request has a server group with the policy affinity.

    All servers of such a group share a host, so they have the room of one zone instead of the sum
    of all zones. A deleted group has no effect.
    """
    try:
        return spec.group is not None and bool(
            store.read(lambda tx: server_groups.show(tx, spec.group or "")).policy == "affinity"
        )
    except errors.NotFound:  # A deleted group has no effect.
        return False


def text(
    spec: RequestSpec, explanation: Explanation, count: int, room: int, is_together: bool
) -> str:
    """Return the explanation as text for people.

    Args:
        spec: The request.
        explanation: The scheduler's answer.
        count: The requested number of servers.
        room: The number of servers that fit, on one host if ``is_together``.
        is_together: True if all servers must share a host.
    """
    lines = [
        "needs "
        + ", ".join(
            [f"{amount} {name}" for name, amount in sorted(spec.resources.items())]
            + spec.required_traits
            + [f"not {name}" for name in spec.forbidden_traits]
        )
    ]
    lines.append(f"{explanation.total} hosts, {explanation.passing} of them can take one")
    lines += [f"  {row['hosts']:>5}  {row['text']}" for row in explanation.removed]
    lines += [
        f"         {name}: {why}" for name, why in sorted(explanation.by_host.items())[:NAMED]
    ]
    if len(explanation.by_host) > NAMED:
        lines.append(f"         and {len(explanation.by_host) - NAMED} more: --json names all")
    lines.append(
        f"room for {room} more{' on one host' * is_together}" + (", by zone:" if room else "")
    )
    if room:
        lines.append(
            columns([["", zone, str(number)] for zone, number in sorted(explanation.room.items())])
        )
        lines.append("best first: " + ", ".join(explanation.hosts[:NAMED]))
    lines.append(f"{count} of them: {'yes' if room >= count else 'no'}")
    return "\n".join(lines)
