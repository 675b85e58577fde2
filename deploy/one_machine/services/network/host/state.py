# SPDX-License-Identifier: Apache-2.0
"""The state folder: assigned numbers, our bridges, and the last description.

A number is a port's mark or a bridge's conntrack zone. A freed number is not assigned again in the
same change, so that rules of another port never apply to a packet on its way. A bridge is stored
before it is made and forgotten after its removal, because its name does not show that it is ours.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from deploy.one_machine.services.json_types import JsonValue

MAX_NUMBER = 0xFFFE


def assign(before: Mapping[str, int], all_names: Iterable[str]) -> dict[str, int]:
    """Return name -> number for all names.

    A name keeps its number from ``before``. New names get the lowest numbers that are not in
    ``before``, in their order.

    Raises:
        StopIteration: No number below ``MAX_NUMBER`` is free.
    """
    names = list(dict.fromkeys(all_names))
    taken = set(before.values())
    free = (number for number in range(1, MAX_NUMBER) if number not in taken)
    return {name: before[name] if name in before else next(free) for name in names}


class StateFolder:
    """The state folder of one network agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        numbers = self._read("numbers.json") or {}
        self.ports: dict[str, int] = numbers.get("ports", {})
        self.zones: dict[str, int] = numbers.get("zones", {})
        self.sysctls: dict[str, str] = numbers.get("sysctls", {})

    def number(self, ports: Iterable[str], bridges: Iterable[str]) -> None:
        """Assign and store numbers for all ports and bridges.

        A port that is left out loses its number. A bridge keeps its number until `forget`.
        """
        former = (dict(self.ports), dict(self.zones))
        self.ports = assign(self.ports, ports)
        self.zones = assign(self.zones, [*self.zones, *bridges])
        if former != (self.ports, self.zones):
            self.save()

    def forget(self, bridges: Iterable[str]) -> None:
        """Remove the numbers of bridges that were removed from the kernel, and store the rest."""
        removed = set(bridges) & set(self.zones)
        if removed:
            self.zones = {name: zone for name, zone in self.zones.items() if name not in removed}
            self.save()

    def save(self) -> None:
        """Write the numbers and the former sysctl values to numbers.json."""
        self._write(
            "numbers.json", {"ports": self.ports, "zones": self.zones, "sysctls": self.sysctls}
        )

    def description(self) -> JsonValue:
        """Return the last stored description, or None if the file is missing or incomplete."""
        return self._read("description.json")

    def save_description(self, tree: JsonValue) -> None:
        """Store a description durably, for a start without the network service."""
        self._write("description.json", tree, durable=True)

    def clear(self) -> None:
        """Delete the stored numbers and description. Empty ``ports``, ``zones``, ``sysctls``."""
        for name in ("numbers.json", "description.json"):
            for path in (self.folder / name, self.folder / f"{name}.new"):
                path.unlink(missing_ok=True)
        self.ports, self.zones, self.sysctls = {}, {}, {}

    def _read(self, name: str) -> JsonValue:
        try:
            return json.loads((self.folder / name).read_text())
        # A power cut may leave an incomplete file.
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def _write(self, name: str, tree: JsonValue, durable: bool = False) -> None:
        """Replace a file as a whole.

        Only ``durable`` files are synced. The numbers belong to kernel objects, which a power cut
        removes too.
        """
        part = self.folder / f"{name}.new"
        with part.open("w") as file:
            json.dump(tree, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(self.folder / name)
