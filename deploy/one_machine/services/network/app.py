# SPDX-License-Identifier: Apache-2.0
"""The routes of the network service, all in one list, behind keystonemiddleware."""

from deploy.one_machine.services.guard import HeaderAuthentication
from deploy.one_machine.services.network.agents import IpAvailability, NetworkAgents
from deploy.one_machine.services.network.caller import NetworkCaller, is_open
from deploy.one_machine.services.network.documents import (
    AvailabilityZones,
    NetworkExtensions,
    NetworkVersions,
)
from deploy.one_machine.services.network.fabric import Fabric
from deploy.one_machine.services.network.faults import write_error
from deploy.one_machine.services.network.floating_ips import FloatingIpsApi
from deploy.one_machine.services.network.host_api import HostApi
from deploy.one_machine.services.network.networks import NetworksApi
from deploy.one_machine.services.network.port_bindings import PortBindings
from deploy.one_machine.services.network.ports import PortsApi
from deploy.one_machine.services.network.quotas import NetworkQuotas
from deploy.one_machine.services.network.routers import RouterInterfaces, RoutersApi
from deploy.one_machine.services.network.security_groups import (
    SecurityGroupRulesApi,
    SecurityGroupsApi,
)
from deploy.one_machine.services.network.subnets import SubnetsApi
from deploy.one_machine.services.resource import Collection, PutItem
from deploy.one_machine.services.web import App, application

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
    """Return the app without keystonemiddleware. The app trusts the headers of the middleware."""
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
    for resource in RESOURCES:
        app.add_route(f"/v2.0/{resource.plural}", Collection(fabric, resource))
        app.add_route(f"/v2.0/{resource.plural}/{{key}}", PutItem(fabric, resource))
    return app
