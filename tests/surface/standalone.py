# SPDX-License-Identifier: Apache-2.0
"""The embedded services identity, image and network in this process.

keystonemiddleware protects the image and network services.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from deploy.one_machine.services.database import Database
from deploy.one_machine.services.guard import add_authentication
from deploy.one_machine.services.identity import app as identity_app
from deploy.one_machine.services.identity import schema as identity_schema
from deploy.one_machine.services.identity.service import IdentityService
from deploy.one_machine.services.image import app as image_app
from deploy.one_machine.services.image import caller as image_caller
from deploy.one_machine.services.image import schema as image_schema
from deploy.one_machine.services.image.files import ImageFiles
from deploy.one_machine.services.image.store import ImageStore
from deploy.one_machine.services.network import app as network_app
from deploy.one_machine.services.network import caller as network_caller
from deploy.one_machine.services.network import schema as network_schema
from deploy.one_machine.services.network.fabric import Fabric, NetworkSettings
from deploy.one_machine.services.network.hosts import HostRegistry
from deploy.one_machine.services.resource import moment
from tests.surface import site
from tests.surface.identity import OWNER, Identity
from tests.surface.site import Site

OCTETS = {"Content-Type": "application/octet-stream"}


class Standalone:
    """The identity, image and network services with records. ``close`` ends them."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._identity: Identity = identity
        self._opened: list[Database] = []
        #: The falcon applications, without keystonemiddleware.
        self.applications: dict[str, Any] = {}
        self.identity = self._identity_site(folder)
        self.image = self._image_site(folder)
        self.network = self._network_site(folder)
        for service_site in self.sites:
            service_site.save()

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.identity, self.image, self.network

    def close(self) -> None:
        for database in self._opened:
            database.close()

    def _open(self, path: Path, tables: Any) -> Database:
        self._opened.append(Database(path, tables))
        return self._opened[-1]

    def _site(
        self,
        name: str,
        application: Any,
        path: Path,
        is_open: Callable[[str], bool] | None = None,
        also: Callable[[], None] = lambda: None,
    ) -> Site:
        self.applications[name] = application
        if is_open is not None:
            application = add_authentication(application, self._identity.middleware(), is_open)
        return Site(
            name,
            application,
            self._identity.tokens,
            {"own": {}, "foreign": {}},
            site.Database(path),
            also=also,
        )

    def _identity_site(self, folder: Path) -> Site:
        """Return a copy of the identity service. Tests may remove users of the copy.

        The original service issues and checks the tokens.
        """
        path = folder / "identity.db"
        with sqlite3.connect(self._identity.path) as source, sqlite3.connect(path) as copy:
            source.backup(copy)
        new_site = self._site(
            "identity",
            identity_app.build(
                IdentityService(self._open(path, identity_schema.METADATA), timedelta(hours=12))
            ),
            path,
        )
        own, roles = new_site.ids["own"], _get(new_site, "/v3/roles")["roles"]
        own |= {
            "roles": next(record["id"] for record in roles if record["name"] == "member"),
            "regions": "RegionOne",
            "services": _get(new_site, "/v3/services")["services"][0]["id"],
            "domains": "default",
            "endpoints": _get(new_site, "/v3/endpoints")["endpoints"][0]["id"],
        }
        body = {"service_id": own["services"], "resource_name": "servers", "default_limit": 5}
        [registered] = _post(
            new_site, "admin", "/v3/registered_limits", {"registered_limits": [body]}
        )["registered_limits"]
        own["registered_limits"] = registered["id"]
        for owner, persona in OWNER.items():
            project, user = self._identity.projects[_place(owner)], self._identity.users[persona]
            [limit] = _post(
                new_site,
                "admin",
                "/v3/limits",
                {
                    "limits": [
                        {
                            "service_id": own["services"],
                            "resource_name": "servers",
                            "resource_limit": 3,
                            "project_id": project,
                        }
                    ]
                },
            )["limits"]
            new_site.ids[owner] |= {
                "projects": project,
                "users": user,
                "limits": limit["id"],
            }
        return new_site

    def _image_site(self, folder: Path) -> Site:
        path = folder / "image.db"
        image_names: list[str] = []
        shelf = ImageStore(
            self._open(path, image_schema.METADATA), ImageFiles(folder / "images", 1024 * 1024)
        )
        new_site = self._site(
            "image",
            image_app.build(shelf),
            path,
            image_caller.is_open,
            lambda: [(folder / "images" / image).write_bytes(b"data") for image in image_names],
        )
        for owner, persona in OWNER.items():
            image = _post(
                new_site,
                persona,
                "/v2/images",
                {"name": "i", "disk_format": "raw", "container_format": "bare", "tags": [owner]},
            )["id"]
            assert (
                new_site.ask(
                    persona, "PUT", f"/v2/images/{image}/file", b"data", OCTETS
                ).status_code
                == 204
            )
            new_site.ids[owner] |= {"images": image}
        image_names += [file.name for file in (folder / "images").iterdir() if file.is_file()]
        new_site.ids["own"] |= {"schemas": "image"}
        return new_site

    def _network_site(self, folder: Path) -> Site:
        path = folder / "network.db"
        self.fabric = Fabric(
            self._open(path, network_schema.METADATA), NetworkSettings(has_hosts=False)
        )
        new_site = self._site(
            "network",
            network_app.build(self.fabric),
            path,
            network_caller.is_open,
            lambda: setattr(self.fabric, "hosts", HostRegistry({"host1": 0}, time.monotonic)),
        )
        new_site.ids["own"] |= {"extensions": "router"}
        with self.fabric.change() as change:
            change.connection.execute(
                insert(network_schema.hosts).values(
                    name="host1",
                    tunnel_address="192.0.2.1",
                    external_gateway=True,
                    changed=0,
                    created_at=moment(),
                )
            )
        self.fabric.hosts.note_contact("host1")
        new_site.ids["own"] |= {"hosts": "host1"}
        public = _make(new_site, "admin", "network", {"router:external": True})
        _make(
            new_site,
            "admin",
            "subnet",
            {"network_id": public, "cidr": "172.24.4.0/24", "ip_version": 4},
        )
        for owner, persona in OWNER.items():
            self._network_records(new_site, owner, persona, public)
        return new_site

    def _network_records(self, new_site: Site, owner: str, persona: str, public: str) -> None:
        network = _make(new_site, persona, "network", {"name": owner})
        subnet = _make(
            new_site,
            persona,
            "subnet",
            {"network_id": network, "cidr": "10.0.0.0/24", "ip_version": 4},
        )
        router = _make(
            new_site, persona, "router", {"external_gateway_info": {"network_id": public}}
        )
        answer = new_site.ask(
            persona, "PUT", f"/v2.0/routers/{router}/add_router_interface", {"subnet_id": subnet}
        )
        assert answer.status_code == 200, answer.text
        group = _make(new_site, persona, "security_group", {"name": owner})
        port = _make(
            new_site,
            "admin",
            "port",
            {
                "network_id": network,
                "security_groups": [group],
                "binding:host_id": "host1",
                "device_id": "server",
                "device_owner": "compute:nova",
                "project_id": self._identity.projects[_place(owner)],
            },
        )
        new_site.ids[owner] |= {
            "networks": network,
            "subnets": subnet,
            "routers": router,
            "ports": port,
            "security-groups": group,
            "security-group-rules": _make(
                new_site,
                persona,
                "security_group_rule",
                {"security_group_id": group, "direction": "ingress", "protocol": "tcp"},
            ),
            "floatingips": _make(new_site, persona, "floatingip", {"floating_network_id": public}),
            "bindings": "host1",
            "quotas": self._identity.projects[_place(owner)],
            "public": public,
            "network-ip-availabilities": network,
        }


def _place(owner: str) -> str:
    return "third" if owner == "foreign" else "own"


def _get(new_site: Site, path: str) -> Any:
    answer = new_site.ask("admin", "GET", path)
    assert answer.status_code == 200, answer.text
    return answer.json


def _post(new_site: Site, persona: str, path: str, body: Any) -> Any:
    answer = new_site.ask(persona, "POST", path, body)
    assert answer.status_code < 300, answer.text
    return answer.json


def _make(new_site: Site, persona: str, noun: str, attributes: Any) -> str:
    path = {"floatingip": "floatingips"}.get(noun, noun.replace("_", "-") + "s")
    return str(_post(new_site, persona, f"/v2.0/{path}", {noun: attributes})[noun]["id"])
