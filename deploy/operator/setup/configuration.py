# SPDX-License-Identifier: Apache-2.0
"""Values, secrets and configuration file of the first controller.

Passwords are generated once. The configuration file and the folder ``secrets`` are the only places
with the passwords, and a repeated command reads them there. Invariant: both are written before the
first step that uses a password.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from common.domain.errors import ConfigError
from common.security.tls import is_loopback
from common.service.credentials import FOLDER
from deploy.operator.hosts.join_files import Options, merged, read_options
from deploy.operator.setup.machine import Machine, bracket, read
from deploy.operator.setup.plan import Step

HEAD = "# Made by kilonova setup controller. Every option: kilonova config sample\n"
#: The file of the package, which the operator need not keep.
PACKAGED = Path(__file__).parents[2] / "samples/controller.conf"
REGION = "RegionOne"
#: Section and option of each secret that is a random text.
SECRETS = (
    ("DEFAULT", "secret_key"),
    ("host_keys", "command_secret"),
    ("host_keys", "query_secret"),
    ("metadata", "proxy_shared_secret"),
)
Present = Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Values:
    """The values of the first controller. Those of the machine have priority over new passwords."""

    address: str
    keystone: str
    public: str
    region: str
    #: Passwords. Those of database and broker are quoted for URLs.
    service: str
    database: str
    broker: str
    #: Name of a file in ``secrets`` -> content.
    secrets: Mapping[str, str]

    @property
    def management(self) -> str:
        """The password of the broker's user that creates the users of hosts."""
        return unquote(_password(self.secrets["host_keys.management_url"]))

    def options(self) -> Options:
        """Return section -> option -> value of the configuration file."""
        broker = f"rabbit://kilonova:{self.broker}@{bracket(self.address)}:5671/"
        region = {"region": self.region} if self.region != REGION else {}
        return {
            "DEFAULT": {"transport_url": broker, "my_ip": self.address},
            "database": {
                "url": f"postgresql+psycopg://kilonova:{self.database}@127.0.0.1/kilonova",
                "tls": "false",
            },
            "identity": {"auth_url": self.keystone, "password": self.service, **region},
            "console": {"public_url": self.public},
        }


def read_present(machine: Machine) -> dict[tuple[str, str], str]:
    """Return (section, option) -> value in the configuration file and in ``secrets``.

    Raises:
        ConfigError: The configuration file is malformed.
    """
    path = machine.configuration
    is_own = path.exists() and path.read_text() != PACKAGED.read_text()
    values = read_options(path) if is_own else {}
    for name, value in read_secrets(machine).items():
        section, _, option = name.partition(".")
        values.setdefault((section, option), value)
    return values


def read_secrets(machine: Machine) -> dict[str, str]:
    """Return name -> content of the files in ``secrets``, without those of interrupted writes."""
    files = (machine.configuration.parent / FOLDER).glob("*.*")
    return {file.name: file.read_text().strip() for file in files if file.suffix != ".new"}


def determine(
    given: Mapping[str, str | None], present: Present, environment: Mapping[str, str]
) -> Values:
    """Return the values of the first controller.

    Args:
        given: The options address, keystone and public of the command line.
        present: The result of ``read_present``.
        environment: The variables of this process, for the URL and the region of Keystone.

    Raises:
        ConfigError: A value is missing or not usable. The text names the option.
    """

    def find(section: str, option: str, new: str = "") -> str:
        return present.get((section, option)) or new

    address = given["address"] or find("DEFAULT", "my_ip")
    if is_loopback(address):
        raise ConfigError(
            "give --address IP: the address at which hosts and other controllers reach this machine"
        )
    default_url = find("identity", "auth_url", environment.get("OS_AUTH_URL", ""))
    keystone = (
        _check_url("--keystone", given["keystone"] or default_url).removesuffix("/v3") + "/v3"
    )
    is_safe = keystone.startswith("https://") or is_loopback(urlsplit(keystone).hostname)
    if not is_safe and find("identity", "allow_plain_text").lower() != "true":
        raise ConfigError(
            f"--keystone {keystone}: passwords would travel as plain text. Give an https:// URL, or write into "
            "kilonova.conf only the two lines [identity] and allow_plain_text = true"
        )
    management = f"http://operator:{secrets.token_hex(32)}@127.0.0.1:15672"
    return Values(
        address=address,
        keystone=keystone,
        public=_check_url("--public", given["public"] or find("console", "public_url")),
        region=find("identity", "region", environment.get("OS_REGION_NAME", REGION)),
        service=find("identity", "password", secrets.token_hex(32)),
        database=_password(find("database", "url")) or secrets.token_hex(32),
        broker=_password(find("DEFAULT", "transport_url")) or secrets.token_hex(32),
        secrets={
            f"{section}.{option}": find(section, option, secrets.token_hex(32))
            for section, option in SECRETS
        }
        | {"host_keys.management_url": find("host_keys", "management_url", management)},
    )


def _check_url(option: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"give {option} URL, for example https://cloud.example. {url!r} is no URL"
        )
    return url.rstrip("/")


def _password(url: str) -> str:
    return urlsplit(url).password or ""


class Configuration:
    """The folder ``secrets`` and the configuration file of a controller."""

    def __init__(
        self, machine: Machine, options: Options, secret_values: Mapping[str, str]
    ) -> None:
        self._machine, self._options, self._secrets = machine, options, secret_values
        self._folder = machine.configuration.parent / FOLDER

    def steps(self) -> list[Step]:
        path = self._machine.configuration
        return [
            Step(f"secrets in {self._folder}", self._has_secrets, self._write_secrets),
            Step(f"configuration {path}", self._is_written, self._write),
        ]

    def _missing_secrets(self) -> list[str]:
        """Return the names of secrets that neither the folder nor the configuration file has."""
        present = read_present(self._machine)
        missing = []
        for name, value in self._secrets.items():
            section, _, option = name.partition(".")
            current = present.get((section, option))
            if current is None:
                missing.append(name)
            elif current != value:
                raise ConfigError(
                    f"{self._folder / name} has another value than the first controller's"
                )
        return missing

    def _has_secrets(self) -> bool:
        return not self._missing_secrets()

    def _write_secrets(self) -> None:
        for name in self._missing_secrets():
            path = self._folder / name
            self._machine.write(path, f"{self._secrets[name]}\n", 0o640, group="kilonova")

    def _is_written(self) -> bool:
        """Return True if the configuration file has all options.

        Raises:
            ConfigError: The file has another value of an option, or is malformed.
        """
        return self._text() == read(self._machine.configuration)

    def _write(self) -> None:
        self._machine.write(self._machine.configuration, self._text(), 0o640, group="kilonova")

    def _text(self) -> str:
        """Return the text of the file: present lines, and the missing ones."""
        required = {
            section: {
                option: value
                for option, value in options.items()
                if not (self._folder / f"{section}.{option}").exists()
            }
            for section, options in self._options.items()
        }
        return merged(self._machine.configuration, required, HEAD, PACKAGED.read_text())
