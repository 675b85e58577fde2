# SPDX-License-Identifier: Apache-2.0
"""Speaks to the conductors as a host does, with that host's key: what a thief of a host can say."""

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
    """Registers in place of the host's agent, which must be silent and have no connection to the
    broker, or it gets half of the answers."""

    def __init__(self, conf: cfg.ConfigOpts, keys: OwnKeys) -> None:
        self.host = keys.host
        self._link = HostSide(opener(conf, keys.transport_url or None), keys, self.host)
        self._link.serve({})
        self.last = SyncAnswer(0)
        self.spent = self._register().cookie  #: with this one it has registered
        assert self._register().session

    def _register(self) -> SyncAnswer:
        return self.say(inventory=HostInventory("QEMU", 7002022, self.host, 2, 2048, 20))

    def say(self, host: str = "", **what: Any) -> SyncAnswer:
        """One exchange, in the session and with the cookie of the last unless ``what`` has others.

        Raises:
            NoAnswer: what was said is refused.
        """
        given = {"session": self.last.session, "cookie": self.last.cookie} | what
        said = Sync(host or self.host, boot_id="a boot of the thief", **given)
        reply = self._link.ask(REPORTS, "sync", {"request": to_wire(said)}, 5)
        self.last = from_wire(SyncAnswer, reply["answer"])
        return self.last

    def close(self) -> None:
        self._link.close()
