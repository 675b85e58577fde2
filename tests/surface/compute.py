# SPDX-License-Identifier: Apache-2.0
"""The compute and placement services behind keystonemiddleware, with records of two projects.

``Site.ids`` has the ids of the records of "own" and "foreign", by the part of the path before them.
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
from tests.surface.site import Database, Site, add_content_type


class Hosts:
    """Hosts that answer each query."""

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
    """An image service with an image for each project and a public image."""

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
        image, project = self.records.get(image_id), self.projects.get(token)
        if image is None or (image["owner"] not in (None, project) and project is not None):
            raise errors.NotFound(f"Image {image_id} could not be found.")
        return image

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
        self._changeable_record(image_id, token).update(properties)

    def delete(self, image_id: str, token: str) -> None:
        del self.records[self._changeable_record(image_id, token)["id"]]

    def url(self, image_id: str) -> str:
        return f"http://images/v2/images/{image_id}"

    def _changeable_record(self, image_id: str, token: str) -> dict[str, Any]:
        image = self.record(image_id, token)
        if self.projects.get(token) not in (None, image["owner"]):
            raise errors.Forbidden("The image service does not let this user change it.")
        return image


class Compute:
    """The compute and placement services with their records."""

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
        services = self.cloud.services
        services.agents, services.images = Hosts(), Images(projects)
        self.images: Images = services.images
        self.images.add(IMAGE, None)
        entry = authentication.authenticate(
            app.create(services, default_policy()), identity.options(), compute_faults.body
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
            self._create_records(owner)
        self.ids["own"] |= self._create_cloud_records()
        self.placement = Site(
            "placement",
            authentication.authenticate(
                add_content_type(placement.create(services.store)), identity.options(), faults.body
            ),
            identity.tokens,
            {"own": self._placement(), "foreign": {}},
            self.site.database,
        )
        self.site.save()

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
    def _create_records(self, owner: str) -> None:
        """Create a server with all kinds of related records, and further records of its project."""
        project = self.identity.projects["own" if owner == "own" else "third"]
        records = self.ids[owner]
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
        records |= {"servers": server, "os-volumes_boot": server, "os-interface": port, "metadata": owner,
                  "tags": owner, "ips": owner, "flavors": flavor, "images": image, "os-keypairs": owner,
                  "network": network,
                  "os-server-groups": groups, "os-security-groups": group, "os-security-group-rules": rule,
                  "os-networks": network, "os-tenant-networks": network, "os-volumes": ids.new(),
                  "os-snapshots": ids.new(), "os-quota-sets": project,
                  "os-simple-tenant-usage": project, **self._insert_dependents(server)}
        records |= {"fixed": fixed, **self._floating(project, port, network, owner)}
    # fmt: on

    def _insert_dependents(self, server: str) -> dict[str, str]:
        """Insert a guest, a migration, a share, a volume and a console token of a server.

        Returns:
            The ids of the records and the request id of the server's action.
        """
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
        """Insert an attached volume of a server and return its id."""
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
        floating_id, address = ids.new(), "172.24.4.9" if owner == "own" else "172.24.4.10"
        self.networks.floating_ips.append(
            {
                "id": floating_id,
                "project_id": project,
                "floating_network_id": public,
                "floating_ip_address": address,
                "port_id": port,
                "fixed_ip_address": self.networks.ports_by_id[port]["fixed_ips"][0]["ip_address"],
            }
        )
        return {"os-floating-ips": floating_id, "floating": address}

    def _create_cloud_records(self) -> dict[str, str]:
        """Create or find the records without a project, for example an aggregate."""
        aggregate = self._ask("admin", "POST", "/os-aggregates", {"aggregate": {"name": "fast"}})[
            "aggregate"
        ]
        services = self._ask("admin", "GET", "/os-services")["services"]
        hypervisor = self._ask("admin", "GET", "/os-hypervisors")["hypervisors"][0]["id"]
        service = next(candidate["id"] for candidate in services if candidate["host"] == "host1")
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
        """Return the ids of a host's provider and of its records in placement."""
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
