# SPDX-License-Identifier: Apache-2.0
"""Users of hosts and roles at the broker.

They are managed through RabbitMQ's management API. Without it, an administrator gets the commands.

API: https://www.rabbitmq.com/docs/management#http-api
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import requests
from oslo_config import cfg

from common.domain import errors
from common.domain.json_types import JsonObject
from common.security.broker_identities import Identity

SECONDS = 10.0
#: Time limit for the definitions of thousands of users.
LOAD_SECONDS = 300.0


class Users(Protocol):
    """Manages users at the broker. Each method may be repeated.

    Each method returns the commands that an administrator still has to run, or "" if the change is
    done.

    Raises:
        Unavailable: The management API does not answer, or refuses the change.
    """

    def make(self, identity: Identity, virtual_host: str) -> str:
        """Create the user, or return the commands for this.

        An existing user gets the password, permissions and limits of ``identity``.

        Args:
            identity: Name, password, permissions and limits of the user.
            virtual_host: The virtual host for which the permissions are.

        Returns:
            The commands that an administrator still has to run, or "" if the user is created.

        Raises:
            Unavailable: The management API does not answer, or refuses the change.
        """

    def disconnect(self, user: str) -> str:
        """Close the user's open connections, or return the commands for this.

        Args:
            user: Name of the user. An unknown user is no error.

        Returns:
            The commands that an administrator still has to run, or "" if the connections are
            closed.

        Raises:
            Unavailable: The management API does not answer, or refuses the change.
        """

    def remove(self, user: str) -> str:
        """Delete the user, or return the commands for this.

        Args:
            user: Name of the user. An unknown user is no error.

        Returns:
            The commands that an administrator still has to run, or "" if the user is deleted.

        Raises:
            Unavailable: The management API does not answer, or refuses the change.
        """


class Management:
    """Manages users through the management API.

    ``url`` contains the name and password of a user with the tag administrator.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.auth = (parts.username or "", parts.password or "")

    def make(self, identity: Identity, virtual_host: str) -> str:
        user, host = quote(identity.user, safe=""), quote(virtual_host, safe="")
        self._call("PUT", f"users/{user}", {"password": identity.password, "tags": ""})
        permissions = identity.permissions(virtual_host)
        self._call(
            "PUT",
            f"permissions/{host}/{user}",
            {name: permissions[name] for name in ("configure", "write", "read")},
        )
        for topic in identity.topic_permissions(virtual_host):
            self._call(
                "PUT",
                f"topic-permissions/{host}/{user}",
                {name: topic[name] for name in ("exchange", "write", "read")},
            )
        for name, most in identity.limits.items():
            self._call("PUT", f"user-limits/{user}/{name}", {"value": most})
        return ""

    def load(self, definitions: JsonObject) -> None:
        """Create the objects of a file of definitions, or change existing ones. Delete none.

        Raises:
            Unavailable: The management API does not answer, or refuses the definitions.
        """
        self._call("POST", "definitions", definitions, seconds=LOAD_SECONDS)

    def users_without_rights(self, identities: Sequence[Identity], virtual_host: str) -> list[str]:
        """Return the users that are missing at the broker or have other permissions than today's.

        Raises:
            Unavailable: The management API does not answer, or refuses the request.
        """
        present = self._call("GET", "permissions").json()
        return [
            identity.user
            for identity in identities
            if identity.permissions(virtual_host) not in present
        ]

    def disconnect(self, user: str) -> str:
        self._call("DELETE", f"connections/username/{quote(user, safe='')}", missing=True)
        return ""

    def remove(self, user: str) -> str:
        self._call("DELETE", f"users/{quote(user, safe='')}", missing=True)
        return ""

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        missing: bool = False,
        seconds: float = SECONDS,
    ) -> requests.Response:
        """Send a request to the management API, and return the answer.

        Args:
            method: The HTTP method.
            path: The path below ``/api/``.
            body: The JSON body, or None.
            missing: Accept a 404, because the object may be gone already.
            seconds: Time limit for the answer.

        Raises:
            Unavailable: The management API does not answer, or refuses the request.
        """
        try:
            answer = self._session.request(
                method, f"{self._url}/api/{path}", json=body, timeout=seconds
            )
        except requests.RequestException as problem:
            raise errors.Unavailable(
                f"The broker's management API does not answer at {self._url}: {problem}"
            ) from problem
        if answer.status_code >= 400 and not (missing and answer.status_code == 404):
            raise errors.Unavailable(
                f"The broker's management API at {self._url} refuses {method} {path}: "
                f"{answer.status_code} {answer.text[:200]}"
            )
        return answer


class ByHand:
    """Returns rabbitmqctl commands for an administrator, without access to a management API.

    The administrator types passwords, so that no list of processes shows them.
    """

    def make(self, identity: Identity, virtual_host: str) -> str:
        return _lines(
            [
                ["add_user", identity.user],
                ["change_password", identity.user],
                [
                    "set_permissions",
                    "-p",
                    virtual_host,
                    identity.user,
                    identity.configure,
                    identity.write,
                    identity.read,
                ],
                *(
                    [
                        "set_topic_permissions",
                        "-p",
                        virtual_host,
                        identity.user,
                        topic.exchange,
                        topic.write,
                        topic.read,
                    ]
                    for topic in identity.topics
                ),
                *(
                    [["set_user_limits", identity.user, json.dumps(dict(identity.limits))]]
                    if identity.limits
                    else []
                ),
            ]
        ) + (
            "\nThe first two commands read a password. Enter the user's password from the written file for both. The "
            "first command fails if the user exists already."
        )

    def disconnect(self, user: str) -> str:
        return _lines([["close_all_user_connections", user, "its key was replaced"]])

    def remove(self, user: str) -> str:
        return _lines([["delete_user", user]])


def users(conf: cfg.ConfigOpts) -> Users:
    """Return ``Management`` if ``[host_keys] management_url`` is set, otherwise ``ByHand``."""
    return Management(conf.host_keys.management_url) if conf.host_keys.management_url else ByHand()


def print_instructions(commands: str) -> None:
    """Print the commands for an administrator of the broker to standard error, if any."""
    if commands:
        print(
            f"[host_keys] management_url is not set. Run on the broker's machine:\n{commands}",
            file=sys.stderr,
        )


def _lines(commands: Sequence[Sequence[str]]) -> str:
    return "\n".join("  rabbitmqctl " + shlex.join(command) for command in commands)
