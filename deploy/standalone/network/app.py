# SPDX-License-Identifier: Apache-2.0
"""The routes of the network service, all in one list, behind keystonemiddleware."""


from deploy.standalone.guard import Authentication
from deploy.standalone.network.agents import Agents, Availabilities
from deploy.standalone.network.caller import OPEN, Caller
from deploy.standalone.network.documents import Extensions, Versions, Zones
from deploy.standalone.network.fabric import Fabric
from deploy.standalone.network.faults import write_error
from deploy.standalone.network.floating_ips import FloatingIps
from deploy.standalone.network.host_api import HostApi
from deploy.standalone.network.networks import Networks
from deploy.standalone.network.port_bindings import PortBindings
from deploy.standalone.network.ports import Ports
from deploy.standalone.network.quotas import Quotas
from deploy.standalone.network.resource import Collection, Item, Tags
from deploy.standalone.network.routers import Interfaces, Routers
from deploy.standalone.network.rules import SecurityGroupRules
from deploy.standalone.network.security_groups import SecurityGroups
from deploy.standalone.network.subnets import Subnets
from deploy.standalone.web import App, application

PORTS, ROUTERS = Ports(), Routers()
NOUNS = (Networks(), Subnets(), PORTS, SecurityGroups(), SecurityGroupRules(), ROUTERS, FloatingIps())


def build(fabric: Fabric) -> App:
    """The application by itself: it believes the headers that the middleware sets."""
    app = application([Authentication(OPEN, lambda project, roles: Caller(project or "", roles))])
    app.set_error_serializer(write_error)
    versions, extensions, quotas = Versions(), Extensions(), Quotas(fabric)
    app.add_route("/", versions)
    app.add_route("/v2.0", versions, suffix="resources")
    app.add_route("/v2.0/extensions", extensions)
    app.add_route("/v2.0/extensions/{alias}", extensions, suffix="one")
    app.add_route("/v2.0/availability_zones", Zones())
    app.add_route("/v2.0/quotas", quotas)
    app.add_route("/v2.0/quotas/{project_id}", quotas, suffix="one")
    app.add_route("/v2.0/quotas/{project_id}/default", quotas, suffix="default")
    app.add_route("/v2.0/quotas/{project_id}/details", quotas, suffix="details")
    hosts = HostApi(fabric)
    app.add_route("/v2.0/kilonova/hosts/{name}", hosts)
    app.add_route("/v2.0/kilonova/hosts/{name}/description", hosts, suffix="description")
    interfaces = Interfaces(fabric, ROUTERS)
    app.add_route("/v2.0/routers/{key}/add_router_interface", interfaces, suffix="add")
    app.add_route("/v2.0/routers/{key}/remove_router_interface", interfaces, suffix="remove")
    bindings = PortBindings(fabric, PORTS)
    app.add_route("/v2.0/ports/{key}/bindings", bindings)
    app.add_route("/v2.0/ports/{key}/bindings/{host}", bindings, suffix="one")
    app.add_route("/v2.0/ports/{key}/bindings/{host}/activate", bindings, suffix="activate")
    for path, resource in (("agents", Agents(fabric)), ("network-ip-availabilities", Availabilities(fabric))):
        app.add_route(f"/v2.0/{path}", resource)
        app.add_route(f"/v2.0/{path}/{{key}}", resource, suffix="one")
    for noun in NOUNS:
        tags = Tags(fabric, noun)
        app.add_route(f"/v2.0/{noun.plural}", Collection(fabric, noun))
        app.add_route(f"/v2.0/{noun.plural}/{{key}}", Item(fabric, noun))
        app.add_route(f"/v2.0/{noun.plural}/{{key}}/tags", tags)
        app.add_route(f"/v2.0/{noun.plural}/{{key}}/tags/{{tag}}", tags, suffix="one")
    return app
