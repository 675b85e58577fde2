# SPDX-License-Identifier: Apache-2.0
"""``kilonova setup controller``: make this machine a controller, as docs/install.md does by hand.

Without ``--bundle``, this machine becomes the first controller, with database and broker. With
``--bundle``, this machine becomes another controller of the cloud that made the bundle.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

from common.domain.errors import ConfigError
from deploy.operator.setup import plan
from deploy.operator.setup.broker import Broker
from deploy.operator.setup.bundle import Bundle, load
from deploy.operator.setup.certificates import Certificates
from deploy.operator.setup.configuration import Configuration, determine, read_present
from deploy.operator.setup.database import Database
from deploy.operator.setup.keystone import Registration
from deploy.operator.setup.keystone_client import KeystoneClient
from deploy.operator.setup.machine import Machine, require_programs
from deploy.operator.setup.plan import Step
from deploy.operator.setup.services import PAIRED, SINGLE, Services

SERVERS = {"psql": "postgresql", "rabbitmqctl": "rabbitmq-server"}
NEXT = """Next:
- Let your TLS proxy forward {public}/v2.1 to port 8774 of this machine, and /placement to port 8778.
- Neutron's metadata agents need nova_metadata_host = {address}, and as metadata_proxy_shared_secret the
  text in {folder}/secrets/metadata.proxy_shared_secret.
- Another controller with its packages:
  kilonova setup bundle --address IP - | ssh root@IP kilonova setup controller --yes --bundle -
- A host with its packages: kilonova host add NAME --address IP | ssh root@IP kilonova join -"""


def controller(options: argparse.Namespace) -> int:
    """Print the plan, carry it out, and print ``kilonova status`` as the proof.

    Raises:
        ConfigError: An option, a variable or a package is missing, the machine contradicts the
            plan, or a step fails. The text has the next step.
    """
    given = {name: getattr(options, name) for name in ("address", "keystone", "public")}
    if options.bundle:
        if any(given.values()):
            raise ConfigError(
                "--bundle has all values: leave --address, --keystone and --public out"
            )
        set_up_another(Machine(), load(options.bundle), yes=options.yes)
    else:
        set_up_first(Machine(), given, os.environ, KeystoneClient, yes=options.yes)
    return 0


def set_up_first(
    machine: Machine,
    given: Mapping[str, str | None],
    environment: Mapping[str, str],
    client: Callable[[str, Mapping[str, str], str], KeystoneClient],
    *,
    yes: bool,
) -> None:
    """Make the machine the first controller.

    Args:
        machine: The machine.
        given: The options address, keystone and public of the command line.
        environment: The variables of this process.
        client: Returns the client of Keystone.
        yes: Carry out the plan without a question.

    Raises:
        ConfigError: As ``controller``.
    """
    services = Services(machine, PAIRED + SINGLE)
    require_programs(machine, SERVERS | services.programs())
    values = determine(given, read_present(machine), environment)
    machine.require_address(values.address)
    certificates = Certificates(machine, values.address)
    keystone = client(values.keystone, environment, values.region)
    print(f"The first controller, {values.address}, with Keystone at {values.keystone}:")
    steps = [
        certificates.step(),
        *Configuration(machine, values.options(), values.secrets).steps(),
        Database(machine, unquote(values.database)).step(),
        *Broker(machine, values, certificates).steps(),
        *Registration(keystone, values).steps(),
        services.database_step(),
        *services.steps(),
    ]
    _finish(steps, services, yes)
    folder = machine.configuration.parent
    print(NEXT.format(public=values.public, address=values.address, folder=folder))


def set_up_another(machine: Machine, bundle: Bundle, *, yes: bool) -> None:
    """Make the machine another controller with the files of a bundle.

    Raises:
        ConfigError: As ``controller``.
    """
    services = Services(machine, PAIRED)
    require_programs(machine, services.programs())
    machine.require_address(bundle.address)
    print(f"Another controller, {bundle.address}:")
    steps = [
        Certificates(machine, bundle.address, bundle.certificates).step(),
        *Configuration(machine, bundle.options, bundle.secrets).steps(),
        *services.steps(),
    ]
    _finish(steps, services, yes)
    print("Next: let your TLS proxy use this machine too, for ports 8774 and 8778.")


def _finish(steps: Sequence[Step], services: Services, yes: bool) -> None:
    """Carry out the plan, and print the proof."""
    plan.carry_out(steps, yes=yes)
    print(f"\n{services.prove()}\n")
