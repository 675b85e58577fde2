# SPDX-License-Identifier: Apache-2.0
"""The client of the network service: two calls, with the key of this host.

Every failure to get an answer is an OSError, so that the loop tries again later.
"""

from urllib.parse import quote

import requests

from deploy.one_machine.services.json_types import Body, JsonValue
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key

ANSWER_TIMEOUT_SECONDS = 10.0  # beside the agreed wait


class HostApiClient:
    """One host's part of the API. Its sessions are used by one thread each."""

    def __init__(self, url: str, host: str, key: str) -> None:
        self._url = f"{url.rstrip('/')}/v2.0/kilonova/hosts/{quote(host, safe='')}"
        self._polling, self._reporting = requests.Session(), requests.Session()
        for session in (self._polling, self._reporting):
            session.headers[HEADER] = wiring_key(key)

    def description(self, seen: int, wait: float) -> JsonValue:
        """The description once its revision is above ``seen``; None when nothing changed for
        ``wait`` seconds.

        Raises OSError.
        """
        answer = self._call(
            self._polling,
            "GET",
            f"/description?seen={seen}&wait={wait:.0f}",
            timeout=wait + ANSWER_TIMEOUT_SECONDS,
        )
        if answer.status_code == 304:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise OSError("the network service sent no JSON") from error

    def acknowledge(self, body: Body) -> None:
        """This much is applied. Raises OSError."""
        self._call(self._reporting, "PUT", "", json=body, timeout=ANSWER_TIMEOUT_SECONDS)

    def _call(
        self, session: requests.Session, method: str, path: str, **options: JsonValue
    ) -> requests.Response:
        try:
            answer = session.request(method, f"{self._url}{path}", allow_redirects=False, **options)
        except (requests.RequestException, ValueError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if answer.status_code not in (200, 204, 304):
            raise OSError(f"the network service answered {answer.status_code}: {answer.text[:300]}")
        return answer
