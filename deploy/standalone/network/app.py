# SPDX-License-Identifier: Apache-2.0
"""The routes of the network service, all in one list, behind keystonemiddleware."""

from deploy.standalone.guard import HeaderAuthentication
from deploy.standalone.network.agents import IpAvailability, NetworkAgents
from deploy.standalone.network.caller import NetworkCaller, is_open
from deploy.standalone.network.documents import (
    AvailabilityZones,
    NetworkExtensions,
    NetworkVersions,
)
from deploy.standalone.network.fabric import Fabric
from deploy.standalone.network.faults import write_error
from deploy.standalone.network.floating_ips import FloatingIpsApi
from deploy.standalone.network.host_api import HostApi
from deploy.standalone.network.networks import NetworksApi
from deploy.standalone.network.port_bindings import PortBindings
from deploy.standalone.network.ports import PortsApi
from deploy.standalone.network.quotas import NetworkQuotas
from deploy.standalone.network.routers import RouterInterfaces, RoutersApi
from deploy.standalone.network.security_groups import SecurityGroupRulesApi, SecurityGroupsApi
from deploy.standalone.network.subnets import SubnetsApi
from deploy.standalone.resource import Collection, PutItem
from deploy.standalone.web import App, application

RESOURCES = (
    NetworksApi(),
    SubnetsApi(),
    PortsApi(),
    SecurityGroupsApi(),
    SecurityGroupRulesApi(),
    RoutersApi(),
    FloatingIpsApi(),
)


def build(fabric: Fabric) -> App:
    """The application by itself: it believes the headers that the middleware sets."""
    app = application([HeaderAuthentication(is_open, NetworkCaller)])
    app.set_error_serializer(write_error)
    extensions, quotas = NetworkExtensions(), NetworkQuotas(fabric)
    app.add_route("/", NetworkVersions())
    app.add_route("/v2.0/extensions", extensions)
    app.add_route("/v2.0/extensions/{alias}", extensions, suffix="one")
    app.add_route("/v2.0/availability_zones", AvailabilityZones())
    app.add_route("/v2.0/quotas/{project_id}", quotas, suffix="one")
    app.add_route("/v2.0/quotas/{project_id}/default", quotas, suffix="default")
    app.add_route("/v2.0/quotas/{project_id}/details", quotas, suffix="details")
    hosts = HostApi(fabric)
    app.add_route("/v2.0/kilonova/hosts/{name}", hosts)
    app.add_route("/v2.0/kilonova/hosts/{name}/description", hosts, suffix="description")
    interfaces = RouterInterfaces(fabric)
    app.add_route("/v2.0/routers/{key}/add_router_interface", interfaces, suffix="add")
    app.add_route("/v2.0/routers/{key}/remove_router_interface", interfaces, suffix="remove")
    bindings = PortBindings(fabric)
    app.add_route("/v2.0/ports/{key}/bindings", bindings)
    app.add_route("/v2.0/ports/{key}/bindings/{host}", bindings, suffix="one")
    app.add_route("/v2.0/ports/{key}/bindings/{host}/activate", bindings, suffix="activate")
    app.add_route("/v2.0/agents", NetworkAgents(fabric))
    app.add_route("/v2.0/network-ip-availabilities/{key}", IpAvailability(fabric))
    for one in RESOURCES:
        app.add_route(f"/v2.0/{one.plural}", Collection(fabric, one))
        app.add_route(f"/v2.0/{one.plural}/{{key}}", PutItem(fabric, one))
    return app
