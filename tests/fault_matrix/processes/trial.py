# SPDX-License-Identifier: Apache-2.0
"""The server of a cell, used through the public APIs like a user and an admin do."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import requests
import sqlalchemy as sa

from common.domain import states
from common.store.schema import block_devices
from common.store.servers import actions
from conductor.engine.engine import Lane
from conductor.workflows import WORKFLOWS
from tests.fault_matrix.processes.world import World
from tests.fault_matrix.stage import BOOTS, CIRCUMSTANCES, SHELVED, WITH_VOLUMES
from tests.waiting import await_true, is_true_within
from tests.workflows.scenarios import KILL, SCENARIOS, Scenario

VERSION, ANSWER_SECONDS, QUIET_SECONDS, HELD_SECONDS = "2.96", 120, 240, 8
#: Statuses after which a client repeats its request. 0 stands for no answer.
UNANSWERED = (0, 502, 503, 504)
#: Requests that need an admin.
OF_ADMINS = (
    "migrate",
    "os-migrateLive",
    "evacuate",
    "shelveOffload",
    "swap_volume",
    "extend_volume",
    "trigger_crash_dump",
)
WITH_VOLUME = ("detach_volume", "swap_volume", "extend_volume")
#: The bodies of actions, if not null.
BODIES: dict[str, Any] = {
    "reboot:SOFT": {"type": "SOFT"},
    "reboot:HARD": {"type": "HARD"},
    "changePassword": {"adminPass": "new"},
    "rescue": {},
    "createImage": {"name": "snap"},
    "createBackup": {"name": "backup", "backup_type": "daily", "rotation": 1},
    "addSecurityGroup": {"name": "web"},
    "removeSecurityGroup": {"name": "web"},
    "os-migrateLive": {"host": None, "block_migration": "auto"},
    "evacuate": {},
}


@dataclass(frozen=True)
class Answer:
    """An answer of the API. The status 0 stands for no answer."""

    status: int
    body: Any = None

    @property
    def is_accepted(self) -> bool:
        return 200 <= self.status < 300


class Trial:
    """The server of a cell.

    Attributes:
        zone: The availability zone of the server.
        was: The row of the server before the action, or None for a create.
    """

    def __init__(self, world: World, workflow: str, step: str, zone: str) -> None:
        self.world, self.workflow, self.zone = world, workflow, zone
        self.circumstance = CIRCUMSTANCES.get((workflow, step), "")
        self.scenario: Scenario = SCENARIOS[workflow]
        self.name = f"cell-{uuid.uuid4().hex[:12]}"
        self.server = ""
        self.volumes: list[str] = []
        self.was: Any = None
        self.key = uuid.uuid4().hex
        self.has_ports = any(
            workflow_step.lane is Lane.NETWORK for workflow_step in WORKFLOWS[workflow].steps
        )
        # Another action was accepted meanwhile.
        self.accepted = False
        # Lets the held process continue.
        self.release: Callable[[], None] = lambda: None
        # The held process had to continue, because another request got no answer.
        self.was_released = False
        self._session = threading.local()

    # --- HTTP ---
    def call(
        self, method: str, url: str, body: Any = None, admin: bool = False, **headers: str
    ) -> Answer:
        """Send one request as the tenant or the admin.

        ``url`` is a path of the Compute API, or a URL of another service.
        """
        session = self._session.__dict__.setdefault("made", requests.Session())
        session.trust_env = False
        token = self.world.tokens["admin" if admin else "demo"]
        try:
            reply = session.request(
                method,
                f"{self.world.cloud.api_url}{url}" if url.startswith("/") else url,
                json=body,
                timeout=ANSWER_SECONDS,
                headers={
                    "X-Auth-Token": token,
                    "OpenStack-API-Version": f"compute {VERSION}",
                    **headers,
                },
            )
        except requests.RequestException:
            return Answer(0)
        return Answer(reply.status_code, reply.json() if reply.content else None)

    def call_until_accepted(self, *arguments: Any, **more: Any) -> Answer:
        """Repeat a call until the service accepts it, as a patient client does."""
        last: list[Answer] = []

        def is_accepted() -> bool:
            last[:] = [self.call(*arguments, **more)]
            return last[0].is_accepted

        await_true(
            is_accepted, 120, lambda: f"{arguments[:2]} is accepted. Last answer: {last}", 0.3
        )
        return last[0]

    # --- creation ---
    def create(self) -> Answer:
        """Request the server. Each request has the same Idempotency-Key."""
        body: dict[str, Any] = {
            "name": self.name,
            "flavorRef": self.world.flavors["m1.nano"],
            "imageRef": self.world.image,
            "availability_zone": self.zone,
            "networks": [{"uuid": self.world.network}] if self.has_ports else "none",
        }
        if self.circumstance == BOOTS:
            body["imageRef"] = ""
            body["block_device_mapping_v2"] = [
                {
                    "boot_index": 0,
                    "uuid": self.world.image,
                    "source_type": "image",
                    "destination_type": "volume",
                    "volume_size": 1,
                    "delete_on_termination": True,
                }
            ]
        elif self.circumstance == WITH_VOLUMES:
            local = {"source_type": "image", "destination_type": "local", "boot_index": 0}
            body["block_device_mapping_v2"] = [
                {**local, "uuid": self.world.image, "delete_on_termination": True},
                {
                    "boot_index": -1,
                    "uuid": self.volumes[0],
                    "source_type": "volume",
                    "destination_type": "volume",
                },
            ]
        answer = self.call("POST", "/servers", {"server": body}, **{"Idempotency-Key": self.key})
        if answer.is_accepted:
            self.server = str(answer.body["server"]["id"])
        return answer

    def create_volume(self) -> str:
        """Create a volume, and return its id. ``delete_volumes`` deletes the volume at the end."""
        url = self.world.cloud.volume_url
        project = self.world.seed.demo.session.get_project_id()
        body = self.call_until_accepted(
            "POST", f"{url}/{project}/volumes", {"volume": {"size": 1}}
        ).body
        volume = str(body["volume"]["id"])
        self.volumes.append(volume)
        self.await_volume(volume)
        return volume

    def await_volume(self, volume: str, status: str = "available") -> None:
        url = f"{self.world.cloud.volume_url}/{self.world.seed.demo.session.get_project_id()}"
        last: list[Any] = []

        def has_status() -> bool:
            last[:] = [self.call("GET", f"{url}/volumes/{volume}").body]
            return bool(last[0]) and last[0].get("volume", {}).get("status") == status

        await_true(has_status, 60, lambda: f"the volume is {status}. Last answer: {last}", 0.2)

    def prepare(self) -> None:
        """Create the server, and bring it to the state before the action."""
        if self.circumstance == WITH_VOLUMES:
            self.create_volume()
        if self.scenario.ask in ("attach_volume", "swap_volume"):
            self.create_volume()
        if self.scenario.ask == "create":
            return
        await_true(lambda: self.create().is_accepted, 120, "the server is accepted", 0.3)
        self.settle(states.ACTIVE)
        before = (*(("shelve",) if self.circumstance == SHELVED else ()), *self.scenario.before)
        for request in before:
            if request == KILL:
                host = self.read_row().host
                self.world.cut_power(host)
                self.world.await_down(host)
                self.world.force_down(host)
                continue
            await_true(
                lambda request=request: self.send(request).is_accepted,
                60,
                f"{request} is accepted",
                0.3,
            )
            self.settle()
        self.was = self.read_row()

    # --- requests ---
    def send(self, request: str) -> Answer:
        """Send the request of an action once, "key" or "key:VALUE"."""
        if request == "create":
            return self.create()
        key = request.partition(":")[0]
        here, admin = f"/servers/{self.server}", key in OF_ADMINS
        if key == "softDelete":
            return self.call("DELETE", here)
        if key == "attach_interface":
            body = {"interfaceAttachment": {"net_id": self.world.second}}
            return self.call("POST", f"{here}/os-interface", body)
        if key == "detach_interface":
            ports = self.world.list_ports(self.server)
            return self.call("DELETE", f"{here}/os-interface/{(ports or [uuid.uuid4()])[0]}")
        if key == "attach_volume":
            volume = self.volumes[-1] if self.volumes else self.create_volume()
            body = {"volumeAttachment": {"volumeId": volume}}
            return self.call("POST", f"{here}/os-volume_attachments", body)
        if key in WITH_VOLUME:
            return self._send_volume_request(key)
        if key == "delete":
            key = "forceDelete"
        body = BODIES.get(request)
        if key == "resize":
            body = {"flavorRef": self.world.flavors["m1.tiny"]}
        elif key == "rebuild":
            # Only a rebuild with another image needs the scheduler.
            body = {"imageRef": self.world.other_image}
        return self.call("POST", f"{here}/action", {key: body}, admin=admin)

    def send_meanwhile(self, request: str) -> Answer:
        """Send a request while another action is held.

        The API waits for some actions. After ``HELD_SECONDS`` without an answer the held action
        continues.
        """
        if request == "attach_volume":
            self.create_volume()
        answers: list[Answer] = []

        def is_answered() -> bool:
            answers[:] = [self.send(request)]
            return answers[0].status not in UNANSWERED

        thread = threading.Thread(target=lambda: is_true_within(is_answered, ANSWER_SECONDS, 0.3))
        thread.start()
        thread.join(HELD_SECONDS)
        if thread.is_alive():
            self.was_released = True
            self.release()
        thread.join()
        return answers[0] if answers else Answer(0)

    def _send_volume_request(self, key: str) -> Answer:
        here = f"/servers/{self.server}/os-volume_attachments"
        volume = self.find_attached_volume() or str(uuid.uuid4())
        if key == "detach_volume":
            return self.call("DELETE", f"{here}/{volume}")
        if key == "swap_volume":
            other_volumes = [
                other_volume for other_volume in self.volumes if other_volume != volume
            ] or [self.create_volume()]
            body = {"volumeAttachment": {"volumeId": other_volumes[0]}}
            return self.call("PUT", f"{here}/{volume}", body, admin=True)
        event = {"name": "volume-extended", "server_uuid": self.server, "tag": volume}
        return self.call("POST", "/os-server-external-events", {"events": [event]}, admin=True)

    def find_attached_volume(self) -> str:
        """Return the id of an attached volume from the records, or an empty string."""
        rows = self.world.store.read(
            lambda tx: tx.execute(
                sa.select(block_devices).where(block_devices.c.server_id == self.server)
            ).all()
        )
        return next((str(row.volume_id) for row in rows if row.volume_id), "")

    # --- state ---
    def read_row(self) -> Any:
        return self.world.read_server(self.server)

    def is_quiet(self) -> bool:
        """Return True if the server exists and has no unfinished action."""
        if not self.server:
            return False
        row = self.read_row()
        if row is None or row.action is not None:
            return False
        return all(action.state in actions.ENDED for action in self.world.read_actions(self.server))

    def settle(self, vm_state: str = "") -> None:
        """Wait until the server is quiet, in any state or in this state."""
        await_true(
            lambda: (
                self.is_quiet()
                and self.read_row().vm_state in (vm_state or self.read_row().vm_state, states.ERROR)
            ),
            QUIET_SECONDS,
            lambda: f"the server is quiet. Last state: {self.story()}",
            0.1,
            late=0.05,
        )
        row = self.read_row()
        assert row.vm_state != states.ERROR, f"the preparation failed: {self.story()}"

    def story(self) -> str:
        """Return the state and the actions of the server as text."""
        if not self.server or (row := self.read_row()) is None:
            return f"{self.name} is not there"
        actions = [
            f"{action.workflow}: {action.state} at {action.step} ({action.message or action.cause or ''})"
            for action in self.world.read_actions(self.server)
        ]
        return f"{self.server} {row.vm_state}/{row.task_state} at {row.host}; {'; '.join(actions)}"

    def remove(self) -> None:
        """Delete the server, and wait until no trace is left."""
        if self.server and not self.read_row().deleted:
            url = f"/servers/{self.server}/action"
            last: list[Answer] = []

            def is_accepted() -> bool:
                last[:] = [self.call("POST", url, {"forceDelete": None})]
                return last[0].is_accepted or last[0].status == 404

            await_true(
                is_accepted, 120, lambda: f"the delete is accepted. Last answer: {last}", 0.3
            )
        if self.server:
            self.world.clean_up(self.server)
            await_true(
                lambda: self.read_row().deleted and not self.world.find_remains(self.server),
                QUIET_SECONDS,
                lambda: (
                    f"no trace is left. Remains: {self.world.find_remains(self.server)}. {self.story()}"
                ),
                0.1,
                late=0.1,
            )
        self.delete_volumes()

    def delete_volumes(self) -> None:
        """Wait until the cell's volumes are detached, and delete them."""
        project = self.world.seed.demo.session.get_project_id()
        for volume in self.volumes:
            self.await_volume(volume)
            self.call("DELETE", f"{self.world.cloud.volume_url}/{project}/volumes/{volume}")
        self.volumes.clear()
