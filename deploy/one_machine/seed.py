# SPDX-License-Identifier: Apache-2.0
"""The first flavors, project, image and server of a cloud, created through the public APIs.

deploy/one_machine/up.py uses this module in the virtual environment. Every function looks first,
adds only the missing objects, and returns a note. Each can be repeated.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import openstack
from openstack import exceptions
from openstack.config import OpenStackConfig

from deploy.one_machine.cloud.cloud import Cloud
from deploy.one_machine.cloud.process_control import explain_failure
from deploy.packages import ROOT
from deploy.progress import Failure, run, wait

#: Name -> VCPUs, MiB, GiB.
FLAVORS = {
    "m1.nano": (1, 128, 1),
    "m1.tiny": (1, 512, 1),
    "m1.small": (1, 2048, 20),
    "m1.medium": (2, 4096, 40),
    "m1.large": (4, 8192, 80),
}
IMAGE, SERVER = "tiny", "first"
READY = "kilonova tiny guest: ready"
HELLO = b'#!/bin/sh\necho "kilonova tiny guest: hello, this is $(hostname)"\n'


class Seed:
    """The connections of the users demo and admin to one cloud.

    Attributes:
        launched: The start of the processes (UTC, ISO 8601) if they were just started, or "".
    """

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        for name in ("no_proxy", "NO_PROXY"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), cloud.address)))
        self._connections: dict[str, openstack.connection.Connection] = {}
        self.launched = ""
        # True if this object started the first server.
        self._boots = False

    def connect(self, name: str) -> openstack.connection.Connection:
        """Return the connection of an entry of clouds.yaml, which is made at the first call.

        Args:
            name: "kilonova" (the user demo) or "kilonova-admin" (the user admin).
        """
        if name not in self._connections:
            files = OpenStackConfig(config_files=[str(self.cloud.clouds_yaml)], load_envvars=False)
            self._connections[name] = openstack.connection.Connection(
                config=files.get_one(cloud=name)
            )
        return self._connections[name]

    @property
    def admin(self) -> Any:
        return self.connect("kilonova-admin")

    @property
    def demo(self) -> Any:
        return self.connect("kilonova")

    def host(self) -> str:
        """Wait until the API shows every agent as up, and return a note.

        An update before ``launched`` does not count, because it shows a former state.

        Raises:
            Failure: An agent is not up within 90 s.
        """
        hosts = set(self.cloud.hosts)

        def up() -> bool:
            up_hosts = {
                service.host
                for service in self.admin.compute.services(binary="nova-compute")
                if service.state == "up" and (service.updated_at or "") >= self.launched
            }
            return hosts <= up_hosts

        wait(
            self.tolerate_errors(up),
            90,
            f"The compute service does not count all agents as up (hosts: {', '.join(sorted(hosts))})",
            lambda: explain_failure(self.cloud, "agent"),
        )
        return f"{', '.join(sorted(hosts))} up"

    @staticmethod
    def tolerate_errors(condition: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns ``condition()``, or False after an error of a request.

        A starting service causes such errors.
        """

        def is_true() -> bool:
            try:
                return condition()
            except (exceptions.SDKException, OSError):
                return False

        return is_true

    def flavors(self) -> str:
        """Create the missing flavors of ``FLAVORS``, and return a note."""
        names = {flavor.name for flavor in self.admin.compute.flavors(details=False)}
        missing = [name for name in FLAVORS if name not in names]
        for name in missing:
            vcpus, ram, disk = FLAVORS[name]
            self.admin.compute.create_flavor(name=name, vcpus=vcpus, ram=ram, disk=disk)
        return f"{', '.join(missing)} made" if missing else "all are there"

    def tenant(self) -> str:
        """Ensure that the user demo with the role member in the project demo exists.

        Return a note. An existing user keeps the present password.
        """
        identity = self.admin.identity
        project = identity.find_project("demo", ignore_missing=True) or identity.create_project(
            name="demo", domain_id="default", description="For trying things out"
        )
        user = identity.find_user("demo", ignore_missing=True)
        password = self.cloud.password("demo")
        if user is None:
            user = identity.create_user(
                name="demo", domain_id="default", password=password, default_project_id=project.id
            )
        role = identity.find_role("member", ignore_missing=False)
        identity.assign_project_role_to_user(project, user, role)
        return "user and project demo"

    def image(self) -> str:
        """Build the tiny image, upload it unless the image service has this file, return a note.

        An image of an earlier recipe gets another name and stays, because servers may use it.
        """
        path = self.cloud.home / "tiny" / "tiny.qcow2"
        run(
            [ROOT / "deploy/images/tiny/build", path],
            "Install the packages named at the top of deploy/images/tiny/build.",
            log=self.cloud.log("image-build"),
        )
        digest = hashlib.sha512(path.read_bytes()).hexdigest()
        images = self.admin.image
        existing_images = list(
            images.images(name=IMAGE, status="active", owner=self.admin.session.get_project_id())
        )
        for existing_image in existing_images:
            if existing_image.hash_value != digest:
                images.update_image(
                    existing_image,
                    name=f"{IMAGE}-{existing_image.created_at[:10]}-{existing_image.id[:8]}",
                )
        for existing_image in existing_images:
            if existing_image.hash_value == digest:
                return f"{IMAGE} ({existing_image.id}) is there"
        new_image = images.create_image(
            IMAGE,
            filename=str(path),
            disk_format="qcow2",
            container_format="bare",
            visibility="public",
            wait=True,
            timeout=120,
        )
        return f"{IMAGE} ({new_image.id}), {path.stat().st_size / 2**20:.0f} MiB"

    def server(self, **arguments: object) -> str:
        """Create the first server as the user demo, or start it if it is SHUTOFF.

        Then wait until the server is ACTIVE, and return a note.

        Args:
            arguments: More arguments of a new server, for example networks.

        Raises:
            Failure: The server becomes ERROR, or is not ACTIVE within 180 s.
        """
        compute = self.demo.compute
        server = next((candidate for candidate in compute.servers(name=f"^{SERVER}$")), None)
        self._boots = server is None or server.status == "SHUTOFF"
        if server is None:
            flavor = compute.find_flavor("m1.nano", ignore_missing=False)
            image = next(
                iter(self.demo.image.images(name=IMAGE, status="active", sort="created_at:desc"))
            )
            server = compute.create_server(
                name=SERVER,
                flavor_id=flavor.id,
                image_id=image.id,
                user_data=base64.b64encode(HELLO).decode(),
                **arguments,
            )
        elif server.status == "SHUTOFF":
            compute.start_server(server)
        try:
            server = compute.wait_for_server(server, wait=180, interval=0.5)
        except exceptions.SDKException as problem:
            server = compute.get_server(server)
            fault = (server.fault or {}).get("message", "no fault is recorded")
            raise Failure(
                f"The server {server.id} is {server.status}: {fault}",
                f"See {self.cloud.log('conductor')} and {self.cloud.log('agent')}; then delete it with: "
                f"openstack --os-cloud kilonova server delete {SERVER}",
            ) from problem
        return f"{SERVER} ({server.id}) is {server.status}"

    def first(self) -> Any:
        """Return the server of the user demo with the name ``SERVER``, read from the API.

        Raises:
            StopIteration: There is no such server.
        """
        return next(iter(self.demo.compute.servers(name=f"^{SERVER}$")))

    def console(self) -> str:
        """Wait until the first guest is ready, and return the last lines of the console output.

        These are up to 20 lines, which end with the message ``READY``. If this object did not start
        the guest, return the present last lines without a wait. In a cloud without guests return
        ``PAPER``.

        Raises:
            Failure: The guest is not ready within 120 s.
        """
        if not self.cloud.has_guests:
            return PAPER
        server = self.first()
        if not self._boots:
            return _tail(self._console_text(server.id))
        deadline, text = time.monotonic() + 120, ""
        while READY not in text:
            if time.monotonic() > deadline:
                raise Failure(
                    f"The console of server {SERVER} did not show {READY!r} within 120 s:\n{_tail(text)}",
                    f"See {self.cloud.log('agent')}.",
                )
            text = self._console_text(server.id)
            time.sleep(0.5)
        return _tail(text[: text.index(READY) + len(READY)])

    def _console_text(self, server: str) -> str:
        try:
            return str(self.demo.compute.get_server_console_output(server)["output"])
        except (exceptions.ConflictException, exceptions.NotFoundException):
            return ""  # the log appears with the guest


#: The reason why a cloud without guests has no console.
PAPER = "servers of the memory driver exist only in the database"


def _tail(text: str) -> str:
    """Return a heading and the last 20 lines, each cut to 150 characters.

    "?" replaces unprintable characters.
    """
    lines = [
        "".join(letter if letter.isprintable() else "?" for letter in line.expandtabs())
        for line in text.replace("\r", "").splitlines()[-20:]
    ]
    return "\n        ".join(["the guest's console:", *("| " + line[:150] for line in lines)])
