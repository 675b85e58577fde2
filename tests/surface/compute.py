# SPDX-License-Identifier: Apache-2.0
"""The compute and the placement service behind keystonemiddleware, over one database with records
of two projects.

Every record has a name in ``Site.ids`` by the part of the path that stands before it: of "own" and
of "foreign".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from common.clients.image import Image
from common.domain import errors, ids
from common.domain.models import Flavor, ImageRef, Interface
from common.domain.wire import to_wire
from common.store import schema
from common.store.servers import console_tokens, guests
from common.store.tenants import flavors
from compute_api.compute import app
from compute_api.compute import faults as compute_faults
from compute_api.http import authentication
from compute_api.placement import app as placement
from compute_api.placement import faults
from tests.api.conftest import IMAGE, Cloud, default_policy
from tests.api.networks import Networks
from tests.surface.bodies import PUBLIC_KEY
from tests.surface.identity import OWNER, PERSONAS, Identity
from tests.surface.site import Database, Site, typed


class Hosts:
    """Hosts that answer every question."""

    def query(
        self, host: str, verb: str, arguments: dict[str, Any], timeout: float = 10
    ) -> dict[str, Any]:
        return {
            "host": "192.0.2.7",
            "port": 41234,
            "secret": "s" * 43,
            "output": "one\ntwo",
            "uptime": " 1 day\n",
        }

    def do(self, host: str, commands: Any, access: Any) -> bool:
        return True


class Images:
    """An image service in which each project has an image of its own, and one is everybody's."""

    def __init__(self, projects: dict[str, str | None]) -> None:
        self.projects, self.down = projects, False
        self.records: dict[str, dict[str, Any]] = {}

    def add(self, image_id: str, owner: str | None, **more: str) -> str:
        self.records[image_id] = {
            "id": image_id,
            "name": "image",
            "status": "active",
            "owner": owner,
            "size": 1024,
            "min_ram": 0,
            "min_disk": 0,
            "created_at": "2026-01-01T00:00:00Z",
            "updated_at": "2026-01-01T00:00:00Z",
            "disk_format": "qcow2",
            **more,
        }
        return image_id

    def record(self, image_id: str, token: str) -> dict[str, Any]:
        found, project = self.records.get(image_id), self.projects.get(token)
        if found is None or (found["owner"] not in (None, project) and project is not None):
            raise errors.NotFound(f"Image {image_id} could not be found.")
        return found

    def show(self, image_id: str, token: str) -> Image:
        try:
            self.record(image_id, token)
        except errors.NotFound as problem:
            raise errors.BadRequest(f"Can not find requested image {image_id}.") from problem
        return Image(ImageRef(image_id, "qcow2", 1024**2, properties={"architecture": "x86_64"}))

    def page(self, query: Any, token: str) -> list[dict[str, Any]]:
        project = self.projects.get(token)
        return [
            row
            for row in self.records.values()
            if project is None or row["owner"] in (None, project)
        ]

    def change(self, image_id: str, properties: Any, token: str) -> None:
        self._written(image_id, token).update(properties)

    def delete(self, image_id: str, token: str) -> None:
        del self.records[self._written(image_id, token)["id"]]

    def url(self, image_id: str) -> str:
        return f"http://images/v2/images/{image_id}"

    def _written(self, image_id: str, token: str) -> dict[str, Any]:
        found = self.record(image_id, token)
        if self.projects.get(token) not in (None, found["owner"]):
            raise errors.Forbidden("The image service does not let this user change it.")
        return found


class Compute:
    """Both services, and how their records are made."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.identity = identity
        projects = {
            token: None if name in ("admin", "service") else identity.projects[_project(name)]
            for name, token in identity.tokens.items()
        }
        self.networks = Networks(projects)
        self.cloud = Cloud(
            f"sqlite:///{folder}/compute.db", secret_key="k", networks=self.networks, max_limit=100
        )
        self.cloud.furnish()
        self.cloud.add_host("host2")
        made = self.cloud.services
        made.agents, made.images = Hosts(), Images(projects)
        self.images: Images = made.images
        self.images.add(IMAGE, None)
        entry = authentication.authenticated(
            app.create(made, default_policy()), identity.options(), compute_faults.body
        )
        self.ids: dict[str, dict[str, str]] = {"own": {}, "foreign": {}}
        self.site = Site(
            "compute",
            entry,
            identity.tokens,
            self.ids,
            Database(folder / "compute.db"),
            (self.networks, self.images),
        )
        for owner in self.ids:
            self._records(owner)
        self.ids["own"] |= self._cloudwide()
        self.placement = Site(
            "placement",
            authentication.authenticated(
                typed(placement.create(made.store)), identity.options(), faults.body
            ),
            identity.tokens,
            {"own": self._placement(), "foreign": {}},
            self.site.database,
        )
        self.site.keep()

    def close(self) -> None:
        self.cloud.store.close()

    def _ask(
        self, owner: str, method: str, path: str, body: Any = None, version: str = "2.103"
    ) -> Any:
        answer = self.site.ask(
            OWNER.get(owner, owner),
            method,
            "/v2.1" + path,
            body,
            {"OpenStack-API-Version": f"compute {version}"},
        )
        assert answer.status_code < 300, (path, answer.text)
        return answer.json if answer.content else None

    # fmt: off
    def _records(self, owner: str) -> None:
        """A server with everything that can hang on one, and what else is a project's or a
        user's."""
        project = self.identity.projects["own" if owner == "own" else "third"]
        known = self.ids[owner]
        network = self.networks.add_network(owner, project)
        flavor = f"private-{owner}"
        self.cloud.add_flavor(Flavor(flavor, flavor, 1, 512, 1, extra_specs={"hw:cpu_policy": "shared"}))
        self.cloud.change(schema.flavors, schema.flavors.c.flavorid == flavor, is_public=False)
        self.cloud.store.write(lambda tx: flavors.grant(tx, flavors.show(tx, flavor), project))
        image = self.images.add(ids.new(), project, **{owner: "value"})
        group = self.networks.add_group(f"web-{owner}", project)
        rule = self.networks.create(self.identity.tokens[OWNER[owner]], "security-group-rules", {
            "security_group_id": group, "direction": "ingress", "ethertype": "IPv4", "protocol": "tcp"})["id"]
        self._ask(owner, "POST", "/os-keypairs", {"keypair": {"name": owner, "type": "ssh", "public_key": PUBLIC_KEY}})
        groups = self._ask(owner, "POST", "/os-server-groups",
                           {"server_group": {"name": "apart", "policy": "affinity"}})["server_group"]["id"]
        server = self._ask(owner, "POST", "/servers", {"server": {
            "name": owner, "imageRef": IMAGE, "flavorRef": "1", "networks": "none", "metadata": {owner: "v"},
            "tags": [owner]}})["server"]["id"]
        port = self.networks.add_port(network, project, device_id=server, security_groups=[group])
        fixed = self.networks.ports_by_id[port]["fixed_ips"][0]["ip_address"]
        self.cloud.set_state(server, interfaces=[to_wire(Interface(port, network, owner, addresses=[{
            "address": fixed, "version": 4, "prefix": 24, "dhcp": True, "floating": []}]))])
        known |= {"servers": server, "os-volumes_boot": server, "os-interface": port, "metadata": owner, "tags": owner,
                  "ips": owner, "flavors": flavor, "images": image, "os-keypairs": owner, "network": network,
                  "os-server-groups": groups, "os-security-groups": group, "os-security-group-rules": rule,
                  "os-networks": network, "os-tenant-networks": network, "os-volumes": ids.new(),
                  "os-snapshots": ids.new(), "os-quota-sets": project,
                  "os-simple-tenant-usage": project, **self._moved(server)}
        known |= {"fixed": fixed, **self._floating(project, port, network, owner)}
    # fmt: on

    def _moved(self, server: str) -> dict[str, str]:
        """A server's action, a migration that ended, its guest's record and a console's token."""
        action = next(row for row in self.cloud.rows(schema.actions) if row.server_id == server)
        with self.cloud.store.begin() as tx:
            guests.add(tx, [{"server_id": server, "host": "host1", "fence": 1}])
            tx.execute(
                sa.insert(schema.migrations),
                {
                    "uuid": ids.new(),
                    "server_id": server,
                    "action_id": action.id,
                    "project_id": action.project_id,
                    "user_id": action.user_id,
                    "type": "live-migration",
                    "status": "running",
                    "source_host": "host1",
                    "dest_host": "host2",
                    "old_flavor": {"id": "1"},
                    "new_flavor": {"id": "2"},
                    "was": "active",
                    "created_at": 0,
                    "updated_at": 0,
                },
            )
            tx.execute(
                sa.insert(schema.share_mappings),
                {
                    "uuid": ids.new(),
                    "server_id": server,
                    "share_id": (share := ids.new()),
                    "tag": "t",
                    "protocol": "NFS",
                    "status": "inactive",
                    "export_location": "192.0.2.9:/x",
                    "access_to": "192.0.2.1",
                    "created_at": 0,
                    "updated_at": 0,
                },
            )
            number = tx.execute(
                sa.select(schema.migrations.c.id).where(schema.migrations.c.server_id == server)
            ).scalar_one()
            token = console_tokens.create(
                tx,
                server,
                "novnc",
                project_id=action.project_id,
                user_id=action.user_id,
                seconds=600,
            )
        return {
            "os-instance-actions": action.request_id,
            "migrations": str(number),
            "shares": share,
            "os-volume_attachments": self._volume(server),
            "os-console-auth-tokens": token,
        }

    def _volume(self, server: str) -> str:
        """A volume that a server has."""
        volume = ids.new()
        values = {
            "uuid": ids.new(),
            "server_id": server,
            "volume_id": volume,
            "attachment_id": ids.new(),
            "status": "attached",
            "source_type": "volume",
            "size_gb": 1,
            "device_name": "/dev/vdb",
            "created_at": 0,
            "updated_at": 0,
        }
        with self.cloud.store.begin() as tx:
            tx.execute(sa.insert(schema.block_devices), values)
        return volume

    def _floating(self, project: str, port: str, network: str, owner: str) -> dict[str, str]:
        public = self.networks.add_network(
            f"public-{owner}", project, "172.24.4.0/24", external=True
        )
        self.networks.add_router(public, network)
        found, address = ids.new(), "172.24.4.9" if owner == "own" else "172.24.4.10"
        self.networks.floating_ips.append(
            {
                "id": found,
                "project_id": project,
                "floating_network_id": public,
                "floating_ip_address": address,
                "port_id": port,
                "fixed_ip_address": self.networks.ports_by_id[port]["fixed_ips"][0]["ip_address"],
            }
        )
        return {"os-floating-ips": found, "floating": address}

    def _cloudwide(self) -> dict[str, str]:
        """What is of no project: an aggregate, services, hypervisors."""
        aggregate = self._ask("admin", "POST", "/os-aggregates", {"aggregate": {"name": "fast"}})[
            "aggregate"
        ]
        found = self._ask("admin", "GET", "/os-services")["services"]
        hypervisor = self._ask("admin", "GET", "/os-hypervisors")["hypervisors"][0]["id"]
        service = next(one["id"] for one in found if one["host"] == "host1")
        action = self._ask("admin", "POST", f"/os-services/{service}/actions", {"evacuate": {}})[
            "host_action"
        ]["id"]
        return {
            "os-aggregates": str(aggregate["id"]),
            "os-hosts": "host1",
            "os-hypervisors": hypervisor,
            "os-services": service,
            "actions": action,
            "extensions": "os-hosts",
            "os-extra_specs": "hw:cpu_policy",
            "os-quota-class-sets": "default",
            "os-instance_usage_audit_log": "2026-01-01 00:00:00",
        }

    def _placement(self) -> dict[str, str]:
        """A host as a provider, and what it has."""
        with self.cloud.store.begin() as tx:
            provider = tx.execute(
                sa.select(schema.providers.c.uuid).where(schema.providers.c.name == "host1")
            ).scalar_one()
        return {
            "resource_providers": provider,
            "inventories": "VCPU",
            "resource_classes": "VCPU",
            "traits": "COMPUTE_NODE",
            "allocations": self.ids["own"]["servers"],
        }


def _project(persona: str) -> str:
    place = PERSONAS.get(persona)
    return place[0] if place else persona
