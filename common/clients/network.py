# SPDX-License-Identifier: Apache-2.0
"""The client of the network service (Neutron v2.0): networks, ports and security groups.

The API reads with the user's token before it accepts a request. The conductor creates, binds,
changes and deletes ports with Kilonova's own token. Networks and subnets are cached for a few
seconds per token. Only ``interface_of`` converts a port to the form that Kilonova stores. A service
that does not answer is Unavailable. A definite refusal is another Problem with the service's
message.
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

#: Number of cached answers, and the seconds that each is cached.
REMEMBERED, KEEP = 1000, 5.0
#: Seconds that the list of extensions is cached. Only an upgrade of the service changes the list.
EXTENSIONS_KEPT_SECONDS = 300.0
#: Maximum number of ids in one URL.
AT_ONCE = 50
NAME = "network service"
#: The binding:profile that marks ports of Kilonova at the network service.
MADE = {"made_by": "kilonova"}
#: Attributes of ports that no host supports.
UNSUPPORTED = ("resource_request", "numa_affinity_policy", "device_profile")


def device_of(port_id: str) -> str:
    """Return the name of a port's interface on its host. Neutron's agents compute the same name."""
    return f"tap{port_id[:11]}"


def is_made(port: JsonObject) -> bool:
    """Return True if the port's binding:profile has the mark of ports that Kilonova created.

    Such a port is deleted with its server.
    """
    return bool((port.get("binding:profile") or {}).get("made_by") == MADE["made_by"])


def find_unsupported_request(port: JsonObject) -> str | None:
    """Return the first attribute of a port that no host supports, or None if hosts support all.

    For example, "binding:vnic_type direct" or "resource_request".
    """
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
    """Return a port in the form that Kilonova stores.

    Data of a network or subnet that is missing in the arguments stays empty. Without a subnet's
    CIDR the prefix is 32 (IPv4) or 128 (IPv6).

    Args:
        port: The port in Neutron's format.
        networks: Networks by id.
        subnets: Subnets by id.
        floating: Floating addresses by fixed address. None: no address has a floating address.
        groups: Names of security groups by id. A group that is missing here is stored with its id.
    """
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
    """The client of the network service. Thread-safe. The endpoint may end in /v2.0.

    Every call raises Unavailable if the cloud has no network service or if it does not answer, and
    Unauthorized, BadRequest, Forbidden, NotFound or Conflict if the service refuses.
    """

    service_name, section = NAME, "network"
    monotonic: Callable[[], float] = time.monotonic
    _cached_lists: dict[tuple[str, str], tuple[float, list[JsonObject]]] = field(
        default_factory=dict, repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _extensions: tuple[float, frozenset[str]] = field(default=(0.0, frozenset()), repr=False)

    def __post_init__(self) -> None:
        self._http = Http(NAME, self._url, self.timeout)

    # --- reads of the API, with the user's token ---
    def networks(self, token: str, project_id: str, ids: Sequence[str] = ()) -> list[JsonObject]:
        """Return the networks with these ids that the token may see, cached for ``KEEP`` seconds.

        Without ids, return the project's networks and the shared networks.
        """
        if ids:
            return self._all(token, "networks", {"id": sorted(set(ids))}, keep=True)
        own = self._all(token, "networks", {"project_id": project_id}, keep=True)
        shared = self._all(token, "networks", {"shared": True}, keep=True)
        return list({network["id"]: network for network in [*own, *shared]}.values())

    def subnets(self, token: str, network_ids: Sequence[str]) -> list[JsonObject]:
        """Return the subnets of these networks, cached for ``KEEP`` seconds. Empty without ids."""
        return (
            self._all(token, "subnets", {"network_id": sorted(set(network_ids))}, keep=True)
            if network_ids
            else []
        )

    def ports(self, token: str, **filters: object) -> list[JsonObject]:
        """Return the ports that the token may see and that match all filters. Not cached.

        A filter is a field, for example ``device_id=server_id``. A list matches any of its values.
        """
        return self._all(token, "ports", filters)

    def port(self, token: str, port_id: str) -> JsonObject:
        """Return a port.

        Raises:
            NotFound: The port does not exist, or the token may not see it.
        """
        return dict(self._json("GET", f"/ports/{port_id}", token)["port"])

    def security_groups(self, token: str, project_id: str, whole: bool = False) -> list[JsonObject]:
        """Return the project's security groups with their ids and names.

        With ``whole``, return all fields, including the rules.
        """
        more = {} if whole else {"fields": ["id", "name"]}
        return self._all(token, "security-groups", {"project_id": project_id, **more})

    def ports_left(self, token: str, project_id: str) -> int:
        """Return the number of further ports that the project's quota permits. -1: unlimited."""
        try:
            port = self._json("GET", f"/quotas/{project_id}/details", token)["quota"]["port"]
            limit, used = int(port["limit"]), int(port["used"]) + int(port.get("reserved", 0))
        except errors.NotFound:  # The service lacks the extension quota_details.
            limit = int(self._json("GET", f"/quotas/{project_id}", token)["quota"]["port"])
            used = 0 if limit < 0 else len(self.ports(token, project_id=project_id, fields=["id"]))
        return -1 if limit < 0 else max(0, limit - used)

    def interfaces(self, token: str, server_id: str) -> list[Interface]:
        """Return a server's ports as interfaces, with floating addresses."""
        return self.described(token, self.ports(token, device_id=server_id), floating=True)

    def described(
        self, token: str, ports: Sequence[JsonObject], floating: bool = False
    ) -> list[Interface]:
        """Return ports as interfaces, with data of their networks, subnets and security groups.

        With ``floating``, the interfaces include floating addresses.
        """
        if not ports:
            return []
        ids = sorted({port["network_id"] for port in ports})
        networks = {network["id"]: network for network in self.networks(token, "", ids)}
        subnets = {subnet["id"]: subnet for subnet in self.subnets(token, ids)}
        group_ids = sorted({group for port in ports for group in port.get("security_groups") or ()})
        filters = {"id": group_ids, "fields": ["id", "name"]}
        groups = (
            {
                group["id"]: group["name"]
                for group in self._all(token, "security-groups", filters, keep=True)
            }
            if group_ids
            else {}
        )
        by_port: dict[str, dict[str, list[str]]] = {}
        for floating_ip in self.floating(token, [port["id"] for port in ports]) if floating else ():
            by_port.setdefault(floating_ip["port_id"], {}).setdefault(
                floating_ip["fixed_ip_address"], []
            ).append(floating_ip["floating_ip_address"])
        return [
            interface_of(port, networks, subnets, floating=by_port.get(port["id"]), groups=groups)
            for port in ports
        ]

    def floating(self, token: str, port_ids: Sequence[str]) -> list[JsonObject]:
        """Return the floating IPs of these ports. Empty if the service has no routers."""
        try:
            return (
                self._all(token, "floatingips", {"port_id": sorted(port_ids)}) if port_ids else []
            )
        except errors.NotFound:
            return []

    def extensions(self, token: str) -> frozenset[str]:
        """Return the aliases of the service's extensions.

        They are cached for ``EXTENSIONS_KEPT_SECONDS``, for all tokens.
        """
        until, aliases = self._extensions
        if not aliases or self.monotonic() >= until:
            aliases = frozenset(
                extension["alias"]
                for extension in self._json("GET", "/extensions", token)["extensions"]
            )
            self._extensions = (self.monotonic() + EXTENSIONS_KEPT_SECONDS, aliases)
        return aliases

    # --- changes by the conductor, with Kilonova's token ---
    def create_ports(self, token: str, ports: Sequence[JsonObject]) -> list[JsonObject]:
        """Create ports and return them. The service creates all of them or none.

        Raises:
            Forbidden: The service refuses, or the project's quota is exceeded.
            Unauthorized, Conflict, BadRequest, NotFound, TooLarge: The service refuses.
            Unavailable: There is no network service, or it does not answer.
        """
        new_ports: list[JsonObject] = self._json("POST", "/ports", token, {"ports": list(ports)})[
            "ports"
        ]
        return new_ports

    def update_port(self, token: str, port_id: str, values: JsonObject) -> JsonObject:
        """Change these fields of a port, and return the whole port as stored.

        Raises:
            NotFound: The port does not exist.
            Conflict, Forbidden, BadRequest: The service refuses.
        """
        return dict(self._json("PUT", f"/ports/{port_id}", token, {"port": values})["port"])

    def delete_port(self, token: str, port_id: str) -> None:
        """Delete a port. A missing port is no error."""
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
        """Return the records of all pages of a list. A long list of ids is split into queries.

        Args:
            token: The token with which the list is read.
            resource: The collection in the service's URLs, for example "security-groups".
            filters: Query parameters. A filter with a list matches any of its values.
            keep: Return cached answers, and cache new answers for ``KEEP`` seconds. Answers without
                records are not cached.
        """
        records: list[JsonObject] = []
        for query_filters in _split(filters):
            query = urlencode(
                [
                    (name, value)
                    for name, values in query_filters.items()
                    for value in (values if isinstance(values, (list, tuple)) else [values])
                ]
            )
            records += (
                self._list_cached(token, resource, query)
                if keep
                else self._list(token, resource, query)
            )
        return records

    def _list_cached(self, token: str, resource: str, query: str) -> list[JsonObject]:
        key = (f"{resource}?{query}", hashlib.sha256(token.encode()).hexdigest())
        with self._lock:
            until, records = self._cached_lists.get(key, (0.0, []))
        if self.monotonic() < until:
            return records
        records = self._list(token, resource, query)
        if records:
            with self._lock:
                if len(self._cached_lists) >= REMEMBERED:
                    self._cached_lists.clear()
                self._cached_lists[key] = (self.monotonic() + KEEP, records)
        return records

    def _list(self, token: str, resource: str, query: str) -> list[JsonObject]:
        key, path, records = resource.replace("-", "_"), f"/{resource}?{query}", []
        while path:
            page = self._json("GET", path, token)
            records += page[key]
            next_pages = [
                link["href"] for link in page.get(f"{key}_links", ()) if link["rel"] == "next"
            ]
            path = f"/{resource}?{next_pages[0].partition('?')[2]}" if next_pages else ""
        return records

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


def _split(filters: JsonMapping) -> Iterable[JsonMapping]:
    """Yield the filters of each query, because a long list of values does not fit into one URL.

    Only the first list with more than ``AT_ONCE`` values is split. Without such a list there is one
    query.
    """
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
    """Return the error for a response with a refusal. The caller raises the error.

    The class is that of ``kind_of``, but an exceeded quota (status 409) is Forbidden. The text
    contains the service's message, or the status if there is no message. For status 401 the text is
    fixed.
    """
    if answer.status_code == 401:
        return errors.Unauthorized(f"The {NAME} does not accept the token.")
    try:
        body = answer.json()["NeutronError"]
        message, kind = (
            (body["message"], body.get("type")) if isinstance(body, dict) else (str(body), None)
        )
    except (ValueError, KeyError, TypeError):
        message, kind = f"it answered {answer.status_code}", None
    if kind == "OverQuota":
        return errors.Forbidden(f"The {NAME} says: {message}"[:500])
    return kind_of(answer.status_code)(f"The {NAME} says: {message}"[:500])
