# SPDX-License-Identifier: Apache-2.0
"""/v3/limits and /v3/registered_limits: there are none, because no service of this cloud asks for them.

Clients see by the empty list that quotas are the services' own, and that nothing can be limited here.
"""

import falcon

from deploy.standalone.identity.gate import Gate
from deploy.standalone.web import answer


class Limits:
    """GET and POST of either noun."""

    def __init__(self, gate: Gate, plural: str) -> None:
        self._gate, self._plural = gate, plural

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.caller(req)
        answer(resp, {self._plural: [], "links": {
            "self": f"{req.prefix}/v3/{self._plural}", "next": None, "previous": None}})

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._gate.admin(req)
        raise falcon.HTTPForbidden(description="No service of this cloud registers limits here: it has its own quotas.")
