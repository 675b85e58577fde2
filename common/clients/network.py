# SPDX-License-Identifier: Apache-2.0
"""The network service (Neutron v2.0), over HTTP only: networks, ports, security groups.

The API reads with the user's token before it accepts a request; the conductor makes, binds, changes
and removes ports with Kilonova's own. Networks and subnets are remembered for a few seconds for
each token. ``interface_of`` is the one place that turns a port into what Kilonova keeps of it. A
service that does not answer is Unavailable; what it refuses for good is another Problem, in the
service's own words.
"""

from __future__ import annotations

import hashlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from common.clients.http import Http, HttpAnswer, OptionalService, RequestOptions, document, kind_of
from common.domain import errors
from common.domain.json_types import JsonMapping, JsonObject
from common.domain.models import OVS_HYBRID, Interface
from common.domain.statuses import PORT_ACTIVE

REMEMBERED, KEEP = 1000, 5.0  # answers, and seconds that each is remembered
EXTENSIONS_KEPT_SECONDS = 300.0  #: they change with an upgrade of the service
AT_ONCE = 50  # ids in one URL
NAME = "network service"
#: The binding:profile of ports that Kilonova made: whose they are is written on the ports
#: themselves.
MADE = {"made_by": "kilonova"}
#: Attributes of ports that no host can carry out.
UNSUPPORTED = ("resource_request", "numa_affinity_policy", "device_profile")


def device_of(port_id: str) -> str:
    """What a host calls the interface of a port; the network service's parts compute the same."""
    return f"tap{port_id[:11]}"


def is_made(port: JsonObject) -> bool:
    """Did Kilonova make this port? Then it goes with its server."""
    return bool((port.get("binding:profile") or {}).get("made_by") == MADE["made_by"])


def find_unsupported_request(port: JsonObject) -> str | None:
    """Name the request of a port that no host can carry out; None if there is none."""
    vnic_type = port.get("binding:vnic_type") or "normal"
    if vnic_type != "normal":
        return f"binding:vnic_type {vnic_type}"
    return next((name for name in UNSUPPORTED if port.get(name)), None)


def interface_of(
    port: JsonObject,
    networks: Mapping[str, JsonObject],
    subnets: Mapping[str, JsonObject],
    *,
    floating: Mapping[str, list[str]] | None = None,
    groups: Mapping[str, str] | None = None,
) -> Interface:
    """A port as Kilonova keeps it. ``floating``: by fixed address; ``groups``: names by id."""
    network = networks.get(port["network_id"], {})
    details = port.get("binding:vif_details") or {}
    return Interface(
        port=port["id"],
        network=port["network_id"],
        label=network.get("name") or "",
        mac=port["mac_address"],
        addresses=[
            _address(fixed, subnets.get(fixed["subnet_id"], {}), floating or {})
            for fixed in port["fixed_ips"]
        ],
        mtu=int(network.get("mtu") or 0),
        own=is_made(port),
        vif_type=OVS_HYBRID
        if details.get("ovs_hybrid_plug")
        else port.get("binding:vif_type") or "",
        device=device_of(port["id"]),
        bridge=details.get("bridge_name") or f"brq{port['network_id'][:11]}",
        active=port.get("status") == PORT_ACTIVE,
        groups=[(groups or {}).get(group) or group for group in port.get("security_groups") or ()],
    )


def _address(
    fixed: JsonObject, subnet: JsonObject, floating: Mapping[str, list[str]]
) -> JsonObject:
    address = fixed["ip_address"]
    version = ipaddress.ip_address(address).version
    mode = {"ipv6_mode": subnet["ipv6_address_mode"]} if subnet.get("ipv6_address_mode") else {}
    cidr = subnet.get("cidr") or f"{address}/{32 if version == 4 else 128}"
    return {
        "address": address,
        "version": version,
        "prefix": ipaddress.ip_network(cidr, strict=False).prefixlen,
        "subnet": fixed["subnet_id"],
        "gateway": subnet.get("gateway_ip"),
        "dns": subnet.get("dns_nameservers") or [],
        "routes": subnet.get("host_routes") or [],
        "dhcp": bool(subnet.get("enable_dhcp")),
        "floating": floating.get(address, []),
        **mode,
    }


@dataclass
class NetworkClient(OptionalService):
    """One process's way to the network service. Thread-safe. Its URL may end in /v2.0."""

    service_name, section = NAME, "network"
    monotonic: Callable[[], float] = time.monotonic
    _kept: dict[tuple[str, str], tuple[float, list[JsonObject]]] = field(
        default_factory=dict, repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _extensions: tuple[float, frozenset[str]] = field(default=(0.0, frozenset()), repr=False)

    def __post_init__(self) -> None:
        self._http = Http(NAME, self._url, self.timeout)

    # --- what the API reads, with the user's token ---
    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[JsonObject]:
        """The networks with these ids that the token may see; without ids the project's own and the
        shared ones."""
        if ids:
            return self._all(token, "networks", {"id": sorted(set(ids))}, keep=True)
        own = self._all(token, "networks", {"project_id": project_id}, keep=True)
        shared = self._all(token, "networks", {"shared": True}, keep=True)
        return list({network["id"]: network for network in [*own, *shared]}.values())

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[JsonObject]:
        """The subnets of these networks."""
        return (
            self._all(token, "subnets", {"network_id": sorted(set(network_ids))}, keep=True)
            if network_ids
            else []
        )

    def ports(self, token: str, **filters: object) -> list[JsonObject]:
        """The ports that have all these values."""
        return self._all(token, "ports", filters)

    def port(self, token: str, port_id: str) -> JsonObject:
        """One port.

        Raises:
            NotFound: there is none that the token may see.
        """
        return dict(self._json("GET", f"/ports/{port_id}", token)["port"])

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[JsonObject]:
        """The project's security groups: id and name, or the whole of them with their rules."""
        more = {} if whole else {"fields": ["id", "name"]}
        return self._all(token, "security-groups", {"project_id": project_id, **more})

    def ports_left(self, token: str, project_id: str) -> int:
        """How many more ports the project's quota allows; -1: no limit."""
        try:
            port = self._json("GET", f"/quotas/{project_id}/details", token)["quota"]["port"]
            limit, used = int(port["limit"]), int(port["used"]) + int(port.get("reserved", 0))
        except errors.NotFound:  # a service without the extension quota_details
            limit = int(self._json("GET", f"/quotas/{project_id}", token)["quota"]["port"])
            used = 0 if limit < 0 else len(self.ports(token, project_id=project_id, fields=["id"]))
        return -1 if limit < 0 else max(0, limit - used)

    def interfaces(self, token: str, server_id: str) -> list[Interface]:
        """A server's ports described whole, floating addresses included."""
        return self.described(token, self.ports(token, device_id=server_id), floating=True)

    def described(
        self, token: str, ports: Sequence[JsonObject], floating: bool = False
    ) -> list[Interface]:
        """These ports with what their networks and subnets say."""
        if not ports:
            return []
        ids = sorted({port["network_id"] for port in ports})
        networks = {network["id"]: network for network in self.networks(token, "", ids)}
        subnets = {subnet["id"]: subnet for subnet in self.subnets(token, ids)}
        used = sorted({group for port in ports for group in port.get("security_groups") or ()})
        named = {"id": used, "fields": ["id", "name"]}
        groups = (
            {
                group["id"]: group["name"]
                for group in self._all(token, "security-groups", named, keep=True)
            }
            if used
            else {}
        )
        by_port: dict[str, dict[str, list[str]]] = {}
        for one in self.floating(token, [port["id"] for port in ports]) if floating else ():
            by_port.setdefault(one["port_id"], {}).setdefault(one["fixed_ip_address"], []).append(
                one["floating_ip_address"]
            )
        return [
            interface_of(port, networks, subnets, floating=by_port.get(port["id"]), groups=groups)
            for port in ports
        ]

    def floating(self, token: str, port_ids: Sequence[str]) -> list[JsonObject]:
        """The floating IPs of these ports; none where the service has no routers."""
        try:
            return (
                self._all(token, "floatingips", {"port_id": sorted(port_ids)}) if port_ids else []
            )
        except errors.NotFound:
            return []

    def extensions(self, token: str) -> frozenset[str]:
        """What the service can do beyond the core, by alias; remembered for some minutes."""
        until, found = self._extensions
        if not found or self.monotonic() >= until:
            found = frozenset(
                one["alias"] for one in self._json("GET", "/extensions", token)["extensions"]
            )
            self._extensions = (self.monotonic() + EXTENSIONS_KEPT_SECONDS, found)
        return found

    # --- what the conductor changes, with its own ---
    def create_ports(self, token: str, ports: Sequence[JsonObject]) -> list[JsonObject]:
        """Make ports, all or none.

        Raises:
            Conflict, Forbidden, BadRequest, NotFound: the service refuses.
        """
        made: list[JsonObject] = self._json("POST", "/ports", token, {"ports": list(ports)})[
            "ports"
        ]
        return made

    def update_port(self, token: str, port_id: str, values: JsonObject) -> JsonObject:
        """Change a port.

        Raises:
            NotFound: it is gone. Conflict, Forbidden, BadRequest: the service refuses.
        """
        return dict(self._json("PUT", f"/ports/{port_id}", token, {"port": values})["port"])

    def delete_port(self, token: str, port_id: str) -> None:
        """Remove a port; one that is gone is fine."""
        try:
            self._json("DELETE", f"/ports/{port_id}", token)
        except errors.NotFound:
            return

    # --- HTTP ---
    def _url(self) -> str:
        return self._base().removesuffix("/v2.0")

    def _all(
        self, token: str, resource: str, filters: JsonMapping, keep: bool = False
    ) -> list[JsonObject]:
        """A list, every page of it; long lists of ids are asked for in pieces."""
        found: list[JsonObject] = []
        for part in _parts(filters):
            query = urlencode(
                [
                    (name, value)
                    for name, values in part.items()
                    for value in (values if isinstance(values, (list, tuple)) else [values])
                ]
            )
            found += (
                self._kept_list(token, resource, query)
                if keep
                else self._list(token, resource, query)
            )
        return found

    def _kept_list(self, token: str, resource: str, query: str) -> list[JsonObject]:
        key = (f"{resource}?{query}", hashlib.sha256(token.encode()).hexdigest())
        with self._lock:
            until, found = self._kept.get(key, (0.0, []))
        if self.monotonic() < until:
            return found
        found = self._list(token, resource, query)
        if found:
            with self._lock:
                if len(self._kept) >= REMEMBERED:
                    self._kept.clear()
                self._kept[key] = (self.monotonic() + KEEP, found)
        return found

    def _list(self, token: str, resource: str, query: str) -> list[JsonObject]:
        key, path, found = resource.replace("-", "_"), f"/{resource}?{query}", []
        while path:
            page = self._json("GET", path, token)
            found += page[key]
            following = [
                link["href"] for link in page.get(f"{key}_links", ()) if link["rel"] == "next"
            ]
            path = f"/{resource}?{following[0].partition('?')[2]}" if following else ""
        return found

    def _json(
        self, method: str, path: str, token: str, body: JsonObject | None = None
    ) -> JsonObject:
        answer = self._answer(method, path, token, body)
        if answer.status_code >= 300:
            raise refusal_of(answer)
        return document(answer, NAME)

    def _answer(
        self,
        method: str,
        path: str,
        token: str,
        body: JsonObject | None = None,
        refusal: Callable[[HttpAnswer], bool] = lambda answer: False,
    ) -> HttpAnswer:
        more: RequestOptions = {} if body is None else {"json": body}
        url = f"{self._http.base()}/v2.0{path}"
        return self._http.send(method, url, token, refusal=refusal, **more)


def _parts(filters: JsonMapping) -> Iterable[JsonMapping]:
    """One query, or several where a list of values is too long for one URL."""
    long = next(
        (
            name
            for name, values in filters.items()
            if isinstance(values, list) and len(values) > AT_ONCE
        ),
        None,
    )
    if long is None:
        yield filters
        return
    for start in range(0, len(filters[long]), AT_ONCE):
        yield {**filters, long: filters[long][start : start + AT_ONCE]}


def refusal_of(answer: HttpAnswer) -> errors.Problem:
    """What the service refuses, with its words."""
    if answer.status_code == 401:
        return errors.Unauthorized(f"The {NAME} does not accept the token.")
    try:
        said = answer.json()["NeutronError"]
        words, kind = (
            (said["message"], said.get("type")) if isinstance(said, dict) else (str(said), None)
        )
    except (ValueError, KeyError, TypeError):
        words, kind = f"it answered {answer.status_code}", None
    if kind == "OverQuota":
        return errors.Forbidden(f"The {NAME} says: {words}"[:500])
    return kind_of(answer.status_code)(f"The {NAME} says: {words}"[:500])
