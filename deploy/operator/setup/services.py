# SPDX-License-Identifier: Apache-2.0
"""The services of a controller: database upgrade, check of the configuration, start, and proof."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.domain.errors import ConfigError
from common.domain.service_binaries import Binary
from deploy.operator.setup.configuration import read_present
from deploy.operator.setup.machine import Machine, require
from deploy.operator.setup.plan import Step

#: Services that run on every controller, and those of the first controller only.
PAIRED = ("api", "conductor", "scheduler", "placement")
SINGLE = ("metadata", "console", "image-gateway")
#: Seconds until conductor and scheduler must have reported, and between two looks.
REPORT_SECONDS, PAUSE_SECONDS = 90.0, 2.0


class Services:
    """The services of a controller.

    Args:
        machine: The controller.
        names: The names of the services, without the prefix.
    """

    def __init__(self, machine: Machine, names: Sequence[str]) -> None:
        self._machine, self._units = machine, [f"kilonova-{name}" for name in names]

    def programs(self) -> dict[str, str]:
        """Return program -> package of the services."""
        return {unit: unit for unit in self._units}

    def database_step(self) -> Step:
        return Step("tables of the database", self._has_tables, self._upgrade)

    def steps(self) -> list[Step]:
        names = ", ".join(unit.removeprefix("kilonova-") for unit in self._units)
        return [
            Step("check of the configuration and external services", self._is_usable, self._check),
            Step(f"services, at each boot: {names}", self._run, self._start),
        ]

    def _kilonova(self, *words: str) -> tuple[str, ...]:
        return ("kilonova", "--config", str(self._machine.configuration), *words)

    def _has_tables(self) -> bool:
        return self._machine.run(*self._kilonova("database", "version")).status == 0

    def _upgrade(self) -> None:
        require(self._machine, *self._kilonova("database", "upgrade"))

    def _is_usable(self) -> bool:
        return self._machine.run(*self._kilonova("config", "check")).status == 0

    def _check(self) -> None:
        result = self._machine.run(*self._kilonova("config", "check"))
        if result.status != 0:
            lines = [line for line in result.output.splitlines() if "does not work" in line]
            raise ConfigError("\n".join(lines) or result.error)

    def _run(self) -> bool:
        return all(
            self._machine.run("systemctl", question, *self._units).output.split()
            == [answer] * len(self._units)
            for question, answer in (("is-enabled", "enabled"), ("is-active", "active"))
        )

    def _start(self) -> None:
        require(self._machine, "systemctl", "enable", "--now", *self._units)

    def prove(self) -> str:
        """Return the output of ``kilonova status`` when the services of this machine are up.

        Raises:
            ConfigError: Conductor or scheduler does not report in time.
        """
        host = read_present(self._machine).get(("DEFAULT", "host"), self._machine.host_name)
        until = time.monotonic() + REPORT_SECONDS
        while True:
            output = self._machine.run(*self._kilonova("status")).output
            up = {tuple(row[:2]) for line in output.splitlines() if "up" in (row := line.split())}
            expected = (Binary.CONDUCTOR, Binary.SCHEDULER)
            silent = [name for name in expected if (name, host) not in up]
            if not silent:
                return output
            if time.monotonic() >= until:
                unit = silent[0].replace("nova", "kilonova", 1)
                raise ConfigError(
                    f"{', '.join(silent)} of this machine did not report within {REPORT_SECONDS:.0f} s: see "
                    f"journalctl -u {unit}. Then run the same command again\n{output}"
                )
            time.sleep(PAUSE_SECONDS)
