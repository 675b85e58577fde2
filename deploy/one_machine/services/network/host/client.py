# SPDX-License-Identifier: Apache-2.0
"""The client of the network service, with the key of this host.

Without a response every call raises OSError, so the loop tries again later.
"""

from urllib.parse import quote

import requests

from deploy.one_machine.services.json_types import Body, JsonValue
from deploy.one_machine.services.network.host_keys import HEADER, wiring_key

#: Seconds beside the time of the long poll.
ANSWER_TIMEOUT_SECONDS = 10.0


class HostApiClient:
    """The API for one host. There is one session for each of the two threads."""

    def __init__(self, url: str, host: str, key: str) -> None:
        self._url = f"{url.rstrip('/')}/v2.0/kilonova/hosts/{quote(host, safe='')}"
        self._polling, self._reporting = requests.Session(), requests.Session()
        for session in (self._polling, self._reporting):
            session.headers[HEADER] = wiring_key(key)

    def description(self, seen: int, wait: float) -> JsonValue:
        """Return the description once its revision differs from ``seen``.

        Args:
            seen: The revision that the host has.
            wait: Seconds until the service answers without a change.

        Returns:
            The description, or None if the revision did not change.

        Raises:
            OSError: There is no valid response.
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
            raise OSError("the network service sent a description that is not JSON") from error

    def acknowledge(self, body: Body) -> None:
        """Report the applied revision, the failed ports and the host's attributes.

        Args:
            body: The report, as `host_api` expects it.

        Raises:
            OSError: There is no valid response.
        """
        self._call(self._reporting, "PUT", "", json=body, timeout=ANSWER_TIMEOUT_SECONDS)

    def _call(
        self, session: requests.Session, method: str, path: str, **options: JsonValue
    ) -> requests.Response:
        try:
            answer = session.request(method, f"{self._url}{path}", allow_redirects=False, **options)
        except (requests.RequestException, ValueError) as error:
            raise OSError(
                f"the request to the network service failed: {type(error).__name__}: {error}"
            ) from error
        if answer.status_code not in (200, 204, 304):
            raise OSError(
                f"the network service answered with status {answer.status_code}: {answer.text[:300]}"
            )
        return answer
