# SPDX-License-Identifier: Apache-2.0
"""The state folder: numbers that the host part gave out, bridges it made, the last description.

A number is a port's mark or a bridge's conntrack zone. A freed one is not given again in the same
change, so that no packet under way is judged by another's rules. A bridge is written down before it
is made, and forgotten only after it is gone: its name does not say whose it is.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from deploy.one_machine.services.json_types import JsonValue

MAX_NUMBER = 0xFFFE


def assign(before: Mapping[str, int], wanted: Iterable[str]) -> dict[str, int]:
    """A number for each of ``wanted``: its own again, or the lowest that nobody has or had just
    now."""
    names = list(dict.fromkeys(wanted))
    taken = set(before.values())
    free = (number for number in range(1, MAX_NUMBER) if number not in taken)
    return {name: before[name] if name in before else next(free) for name in names}


class StateFolder:
    """Of one host part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        numbers = self._read("numbers.json") or {}
        self.ports: dict[str, int] = numbers.get("ports", {})
        self.zones: dict[str, int] = numbers.get("zones", {})
        self.sysctls: dict[str, str] = numbers.get("sysctls", {})

    def number(self, ports: Iterable[str], bridges: Iterable[str]) -> None:
        """Give numbers to all these; bridges stay until they are forgotten."""
        known = (dict(self.ports), dict(self.zones))
        self.ports = assign(self.ports, ports)
        self.zones = assign(self.zones, [*self.zones, *bridges])
        if known != (self.ports, self.zones):
            self.save()

    def forget(self, bridges: Iterable[str]) -> None:
        """These bridges are gone from the kernel."""
        gone = set(bridges) & set(self.zones)
        if gone:
            self.zones = {name: zone for name, zone in self.zones.items() if name not in gone}
            self.save()

    def save(self) -> None:
        """Write the numbers."""
        self._write(
            "numbers.json", {"ports": self.ports, "zones": self.zones, "sysctls": self.sysctls}
        )

    def description(self) -> JsonValue:
        """The last one that was saved, None when there is none."""
        return self._read("description.json")

    def save_description(self, tree: JsonValue) -> None:
        """For a start without the service."""
        self._write("description.json", tree, durable=True)

    def clear(self) -> None:
        """Forget everything."""
        for name in ("numbers.json", "description.json"):
            for path in (self.folder / name, self.folder / f"{name}.new"):
                path.unlink(missing_ok=True)
        self.ports, self.zones, self.sysctls = {}, {}, {}

    def _read(self, name: str) -> JsonValue:
        try:
            return json.loads((self.folder / name).read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # cut off when the power went
            return None

    def _write(self, name: str, tree: JsonValue, durable: bool = False) -> None:
        """Whole or not at all. What concerns the kernel needs no more: both end when the power
        does."""
        part = self.folder / f"{name}.new"
        with part.open("w") as file:
            json.dump(tree, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(self.folder / name)
