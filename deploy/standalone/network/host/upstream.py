# SPDX-License-Identifier: Apache-2.0
"""The network service as the host part sees it: two calls, with a token of the user kilonova.

Every failure to get an answer is an OSError, so that the loop tries again later. keystoneauth renews tokens.
"""
from __future__ import annotations

from typing import Any
from urllib.parse import quote

from keystoneauth1 import exceptions, session
from keystoneauth1.identity import v3

TALK = 10.0      # seconds, besides what was agreed to wait


class NetworkService:
    """One host's part of the API. Its sessions are used by one thread each."""

    def __init__(self, url: str, host: str, auth_url: str, password: str, username: str = "kilonova") -> None:
        self._url = f"{url.rstrip('/')}/v2.0/kilonova/hosts/{quote(host, safe='')}"
        self._asking, self._telling = (session.Session(v3.Password(
            auth_url=auth_url, username=username, password=password, user_domain_id="default", project_name="service",
            project_domain_id="default")) for _ in range(2))

    def ask(self, seen: int, wait: float) -> Any:
        """The description once its revision is above ``seen``; None when nothing changed for ``wait`` seconds.

        Raises OSError.
        """
        answer = self._call(self._asking, "GET", f"/description?seen={seen}&wait={wait:.0f}", timeout=wait + TALK)
        if answer.status_code == 304:
            return None
        try:
            return answer.json()
        except ValueError as problem:
            raise OSError("the network service sent no JSON") from problem

    def acknowledge(self, body: dict[str, Any]) -> None:
        """This much is applied. Raises OSError."""
        self._call(self._telling, "PUT", "", json=body, timeout=TALK)

    def _call(self, by: Any, method: str, path: str, **options: Any) -> Any:
        try:
            return by.request(f"{self._url}{path}", method, connect_retries=0, redirect=False, **options)
        except (exceptions.ClientException, ValueError) as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem
