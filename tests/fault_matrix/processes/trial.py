# SPDX-License-Identifier: Apache-2.0
"""One server of a cell, as its user and the admin handle it: all through the public APIs."""

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
#: Who is answered so, or not at all (0), asks again.
UNHEARD = (0, 502, 503, 504)
#: What only an admin may do.
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
#: The body of an action, where it is not null.
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
    """Of the API; 0: none came."""

    status: int
    body: Any = None

    @property
    def is_accepted(self) -> bool:
        return 200 <= self.status < 300


class Trial:
    """``zone``: whose hosts it lives on."""

    def __init__(self, world: World, workflow: str, step: str, zone: str) -> None:
        self.world, self.workflow, self.zone = world, workflow, zone
        self.circumstance = CIRCUMSTANCES.get((workflow, step), "")
        self.scenario: Scenario = SCENARIOS[workflow]
        self.name = f"cell-{uuid.uuid4().hex[:12]}"
        self.server = ""
        self.volumes: list[str] = []
        self.was: Any = None
        self.key = uuid.uuid4().hex
        self.has_ports = any(one.lane is Lane.NETWORK for one in WORKFLOWS[workflow].steps)
        self.accepted = False  # another action
        self.release: Callable[[], None] = lambda: None  # who is held
        self.was_released = False  # since another request was not answered before
        self._session = threading.local()

    # --- HTTP ---
    def call(
        self, method: str, url: str, body: Any = None, admin: bool = False, **headers: str
    ) -> Answer:
        """One request; ``url`` of the compute API begins with a slash."""
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

    def insist(self, *arguments: Any, **more: Any) -> Answer:
        """Until it is accepted, as a patient client does."""
        last: list[Answer] = []

        def accepted() -> bool:
            last[:] = [self.call(*arguments, **more)]
            return last[0].is_accepted

        await_true(accepted, 120, lambda: f"{arguments[:2]} is answered with {last}", 0.3)
        return last[0]

    # --- what it is made of ---
    def create(self) -> Answer:
        """Ask for it; each time with the same key."""
        wanted: dict[str, Any] = {
            "name": self.name,
            "flavorRef": self.world.flavors["m1.nano"],
            "imageRef": self.world.image,
            "availability_zone": self.zone,
            "networks": [{"uuid": self.world.network}] if self.has_ports else "none",
        }
        if self.circumstance == BOOTS:
            wanted["imageRef"] = ""
            wanted["block_device_mapping_v2"] = [
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
            wanted["block_device_mapping_v2"] = [
                {**local, "uuid": self.world.image, "delete_on_termination": True},
                {
                    "boot_index": -1,
                    "uuid": self.volumes[0],
                    "source_type": "volume",
                    "destination_type": "volume",
                },
            ]
        answer = self.call("POST", "/servers", {"server": wanted}, **{"Idempotency-Key": self.key})
        if answer.is_accepted:
            self.server = str(answer.body["server"]["id"])
        return answer

    def volume(self) -> str:
        """A new one, which is removed at the end."""
        url = self.world.cloud.volume_url
        project = self.world.seed.demo.session.get_project_id()
        made = self.insist("POST", f"{url}/{project}/volumes", {"volume": {"size": 1}}).body
        one = str(made["volume"]["id"])
        self.volumes.append(one)
        self.await_volume(one)
        return one

    def await_volume(self, one: str, status: str = "available") -> None:
        url = f"{self.world.cloud.volume_url}/{self.world.seed.demo.session.get_project_id()}"
        last: list[Any] = []

        def reached() -> bool:
            last[:] = [self.call("GET", f"{url}/volumes/{one}").body]
            return bool(last[0]) and last[0].get("volume", {}).get("status") == status

        await_true(reached, 60, lambda: f"the volume is not {status}: {last}", 0.2)

    def prepare(self) -> None:
        """It is just before the workflow is asked for."""
        if self.circumstance == WITH_VOLUMES:
            self.volume()
        if self.scenario.ask in ("attach_volume", "swap_volume"):
            self.volume()
        if self.scenario.ask == "create":
            return
        await_true(lambda: self.create().is_accepted, 120, "the server is not accepted", 0.3)
        self.settle(states.ACTIVE)
        before = (*(("shelve",) if self.circumstance == SHELVED else ()), *self.scenario.before)
        for wanted in before:
            if wanted == KILL:
                host = self.row().host
                self.world.cut_power(host)
                self.world.await_down(host)
                self.world.force_down(host)
                continue
            await_true(lambda wanted=wanted: self.ask(wanted).is_accepted, 60, wanted, 0.3)
            self.settle()
        self.was = self.row()

    # --- what is asked of it ---
    def ask(self, wanted: str) -> Answer:
        """One action, once."""
        if wanted == "create":
            return self.create()
        key = wanted.partition(":")[0]
        here, admin = f"/servers/{self.server}", key in OF_ADMINS
        if key == "softDelete":
            return self.call("DELETE", here)
        if key == "attach_interface":
            body = {"interfaceAttachment": {"net_id": self.world.second}}
            return self.call("POST", f"{here}/os-interface", body)
        if key == "detach_interface":
            ports = self.world.ports(self.server)
            return self.call("DELETE", f"{here}/os-interface/{(ports or [uuid.uuid4()])[0]}")
        if key == "attach_volume":
            one = self.volumes[-1] if self.volumes else self.volume()
            body = {"volumeAttachment": {"volumeId": one}}
            return self.call("POST", f"{here}/os-volume_attachments", body)
        if key in WITH_VOLUME:
            return self._of_volume(key)
        if key == "delete":
            key = "forceDelete"
        body = BODIES.get(wanted)
        if key == "resize":
            body = {"flavorRef": self.world.flavors["m1.tiny"]}
        elif key == "rebuild":
            body = {"imageRef": self.world.other_image}  # the scheduler is asked for another only
        return self.call("POST", f"{here}/action", {key: body}, admin=admin)

    def ask_beside(self, wanted: str) -> Answer:
        """While another action is held, which goes on when there is no answer so long: the API
        waits for some actions."""
        if wanted == "attach_volume":
            self.volume()
        answers: list[Answer] = []

        def answered() -> bool:
            answers[:] = [self.ask(wanted)]
            return answers[0].status not in UNHEARD

        asking = threading.Thread(target=lambda: is_true_within(answered, ANSWER_SECONDS, 0.3))
        asking.start()
        asking.join(HELD_SECONDS)
        if asking.is_alive():
            self.was_released = True
            self.release()
        asking.join()
        return answers[0] if answers else Answer(0)

    def _of_volume(self, key: str) -> Answer:
        here = f"/servers/{self.server}/os-volume_attachments"
        one = self.attached() or str(uuid.uuid4())
        if key == "detach_volume":
            return self.call("DELETE", f"{here}/{one}")
        if key == "swap_volume":
            free = [other for other in self.volumes if other != one] or [self.volume()]
            body = {"volumeAttachment": {"volumeId": free[0]}}
            return self.call("PUT", f"{here}/{one}", body, admin=True)
        event = {"name": "volume-extended", "server_uuid": self.server, "tag": one}
        return self.call("POST", "/os-server-external-events", {"events": [event]}, admin=True)

    def attached(self) -> str:
        """A volume that it has, by its records; empty: none."""
        rows = self.world.store.read(
            lambda tx: tx.execute(
                sa.select(block_devices).where(block_devices.c.server_id == self.server)
            ).all()
        )
        return next((str(row.volume_id) for row in rows if row.volume_id), "")

    # --- what it is ---
    def row(self) -> Any:
        return self.world.server(self.server)

    def is_quiet(self) -> bool:
        """Has nobody anything to do with it, as far as records say?"""
        if not self.server:
            return False
        row = self.row()
        if row is None or row.action is not None:
            return False
        return all(one.state in actions.ENDED for one in self.world.actions(self.server))

    def settle(self, vm_state: str = "") -> None:
        """Until it is quiet, in this state."""
        await_true(
            lambda: (
                self.is_quiet()
                and self.row().vm_state in (vm_state or self.row().vm_state, states.ERROR)
            ),
            QUIET_SECONDS,
            lambda: f"it does not settle: {self.story()}",
            0.1,
            late=0.05,
        )
        row = self.row()
        assert row.vm_state != states.ERROR, f"prepared in vain: {self.story()}"

    def story(self) -> str:
        """For whoever reads of a failure."""
        if not self.server or (row := self.row()) is None:
            return f"{self.name} is not there"
        actions = [
            f"{one.workflow}: {one.state} at {one.step} ({one.message or one.cause or ''})"
            for one in self.world.actions(self.server)
        ]
        return f"{self.server} {row.vm_state}/{row.task_state} at {row.host}; {'; '.join(actions)}"

    def remove(self) -> None:
        """It is deleted, and nothing of it is left anywhere."""
        if self.server and not self.row().deleted:
            url = f"/servers/{self.server}/action"
            last: list[Answer] = []

            def gone() -> bool:
                last[:] = [self.call("POST", url, {"forceDelete": None})]
                return last[0].is_accepted or last[0].status == 404

            await_true(gone, 120, lambda: f"the delete is answered with {last}", 0.3)
        if self.server:
            self.world.clean_up(self.server)
            await_true(
                lambda: self.row().deleted and not self.world.remains(self.server),
                QUIET_SECONDS,
                lambda: f"left behind: {self.world.remains(self.server)}; {self.story()}",
                0.1,
                late=0.1,
            )
        self.drop_volumes()

    def drop_volumes(self) -> None:
        """Those that were made for it are free, and go."""
        project = self.world.seed.demo.session.get_project_id()
        for one in self.volumes:
            self.await_volume(one)
            self.call("DELETE", f"{self.world.cloud.volume_url}/{project}/volumes/{one}")
        self.volumes.clear()
