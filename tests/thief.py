# SPDX-License-Identifier: Apache-2.0
"""A client with a stolen host key that sends reports to the conductors in the host's name."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

from common.domain.models import HostInventory, Sync, SyncAnswer
from common.domain.wire import from_wire, to_wire
from common.rpc.broker import opener
from common.rpc.host_link import HostSide
from common.security.broker_names import REPORTS
from common.security.host_keys import OwnKeys


class Thief:
    """A client that registers in place of the host's agent.

    The agent must be stopped. With a connection to the broker, it would receive half of the
    answers.
    """

    def __init__(self, conf: cfg.ConfigOpts, keys: OwnKeys) -> None:
        self.host = keys.host
        self._link = HostSide(opener(conf, keys.transport_url or None), keys, self.host)
        self._link.serve({})
        self.last = SyncAnswer(0)
        #: The cookie of the registration. Each cookie is valid once, so this cookie is used up.
        self.spent = self._register().cookie
        assert self._register().session

    def _register(self) -> SyncAnswer:
        return self.send_report(inventory=HostInventory("QEMU", 7002022, self.host, 2, 2048, 20))

    def send_report(self, host: str = "", **fields: Any) -> SyncAnswer:
        """Send a report and return the answer.

        Args:
            host: Host in the report, by default the stolen host.
            fields: Fields of the report. The default session and cookie are from the last answer.

        Raises:
            NoAnswer: The conductor refuses the report.
        """
        fields = {"session": self.last.session, "cookie": self.last.cookie} | fields
        report = Sync(host or self.host, boot_id="a boot of the thief", **fields)
        reply = self._link.ask(REPORTS, "sync", {"request": to_wire(report)}, 5)
        self.last = from_wire(SyncAnswer, reply["answer"])
        return self.last

    def close(self) -> None:
        self._link.close()
