# SPDX-License-Identifier: Apache-2.0
"""``kilonova setup bundle``: the files of another controller in one file.

The file is a JSON object of names and texts, and contains every secret of the cloud. JSON has no
paths, modes or links that an extraction would have to check.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.domain.errors import ConfigError
from common.security import private_files
from common.security.tls import is_loopback
from deploy.operator.hosts.join_files import Options, read_options
from deploy.operator.setup import plan
from deploy.operator.setup.certificates import FILES, Certificates
from deploy.operator.setup.configuration import read_present, read_secrets
from deploy.operator.setup.database import RemoteAccess
from deploy.operator.setup.machine import Machine, bracket, require_programs

#: The option with the management of the broker, which only the first controller has.
MANAGEMENT = ("host_keys", "management_url")
IMAGE_PORT = 9293


@dataclass(frozen=True)
class Bundle:
    """The files of another controller.

    Attributes:
        certificates: Name of a file in the folder ``tls`` -> text.
        secrets: Name of a file in the folder ``secrets`` -> content.
        options: section -> option -> value of the configuration file.
    """

    certificates: Mapping[str, str]
    secrets: Mapping[str, str]
    options: Options

    @property
    def address(self) -> str:
        """The address of the controller."""
        return self.options["DEFAULT"]["my_ip"]


def bundle(options: argparse.Namespace) -> int:
    """Let PostgreSQL accept the other controller, and write the bundle.

    Plan and progress go to standard error, because the bundle may go to standard output.

    Raises:
        ConfigError: This machine is no first controller, the address is not usable, or a step
            fails.
    """
    text = write(Machine(), options.address, yes=options.yes)
    if options.file == "-":
        print(text)
        return 0
    private_files.replace(Path(options.file), text)
    print(
        f"{options.file} has every secret of the cloud. Copy the file over an encrypted connection, and run on the "
        "other machine: kilonova setup controller --bundle FILE. Then delete both files"
    )
    return 0


def write(machine: Machine, address: str, *, yes: bool) -> str:
    """Open the database for the controller at the address, and return the controller's bundle.

    Raises:
        ConfigError: As ``bundle``.
    """
    require_programs(machine, {"psql": "postgresql"})
    present = read_present(machine)
    own = present.get(("DEFAULT", "my_ip"), "")
    if not own or MANAGEMENT not in present:
        raise ConfigError(
            "this machine is no first controller. Run this command where kilonova setup controller ran first"
        )
    if address == own or is_loopback(address):
        raise ConfigError(f"--address {address}: give the address of the other controller")
    certificates = Certificates(machine, own)
    if is_loopback(urlsplit(present["database", "url"]).hostname):
        step = RemoteAccess(machine, certificates, own, address).step()
        plan.carry_out([step], yes=yes, output=sys.stderr)
    folder = machine.configuration.parent
    options = _configuration(machine, present["database", "url"], own, address)
    secrets = read_secrets(machine)
    for section, option in [
        MANAGEMENT,
        *((name, key) for name in options for key in options[name]),
    ]:
        secrets.pop(f"{section}.{option}", None)
    content = {
        "tls": {name: (folder / "tls" / name).read_text() for name in FILES}
        | {"own.pem": certificates.issue(address)},
        "secrets": secrets,
        "configuration": options,
    }
    return json.dumps(content)


def _configuration(machine: Machine, url: str, own: str, address: str) -> Options:
    """Return the options of the other controller: those of this file, with other addresses."""
    rows = read_options(machine.configuration)
    rows.pop(MANAGEMENT, None)
    if is_loopback(urlsplit(url).hostname):
        host = urlsplit(url).netloc.rpartition("@")[2]
        rows["database", "url"] = url.replace(f"@{host}/", f"@{bracket(own)}/")
        rows.pop(("database", "tls"), None)
    rows["DEFAULT", "my_ip"] = rows["api", "host"] = rows["placement", "host"] = address
    rows.setdefault(("image_gateway", "url"), f"https://{bracket(own)}:{IMAGE_PORT}")
    options: dict[str, dict[str, str]] = {}
    for (section, option), value in rows.items():
        options.setdefault(section, {})[option] = value
    return options


def load(name: str) -> Bundle:
    """Read a bundle from a file, or for "-" from the standard input.

    Raises:
        ConfigError: The file cannot be read, or is no bundle.
    """
    try:
        content = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
        result = Bundle(content["tls"], content["secrets"], content["configuration"])
        names_are_valid = set(result.certificates) == set(FILES) and "/" not in "".join(
            result.secrets
        )
        if not (names_are_valid and result.address):
            raise ValueError("files are missing, or have other names")
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ConfigError(
            f"--bundle {name} is no file of kilonova setup bundle, or not whole: {problem}"
        ) from problem
