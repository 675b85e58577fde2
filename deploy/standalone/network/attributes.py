# SPDX-License-Identifier: Apache-2.0
"""What the attributes of a noun may be, said as a table; the one place where a body is checked.

An attribute's `read` turns a JSON value into what is stored or raises ValueError with the end of a sentence. `checked`
returns a whole body, filled up with defaults for a new thing. A wrong body raises a 400 that names the attribute.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.standalone.network.caller import Caller
from deploy.standalone.network.faults import fault

Read = Callable[[Any], Any]
Body = dict[str, Any]
REQUIRED, UNSET = object(), object()
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")


@dataclass(frozen=True)
class Attribute:
    """One attribute of a noun.

    `default` fills a new thing: REQUIRED when it must be given, UNSET when the noun itself decides. Only an admin may
    give an `admin` attribute another value than the default, and only an admin sees a `hidden` one.
    """

    read: Read
    default: Any = UNSET
    post: bool = True
    put: bool = True
    admin: bool = False
    hidden: bool = False
    column: str = ""


def checked(body: object, table: Mapping[str, Attribute], noun: str, caller: Caller, *, new: bool) -> Body:
    """`body` as `table` has it. Raises 400 naming the attribute, 403 for one that is an admin's."""
    if not isinstance(body, dict):
        raise fault("HTTPBadRequest", why=f"Resource body required: '{noun}' must be an object.")
    body = dict(body)
    if "tenant_id" in body:
        tenant = body.pop("tenant_id")
        if body.setdefault("project_id", tenant) != tenant:
            raise fault("HTTPBadRequest", why="'project_id' and 'tenant_id' do not match.")
    unknown = sorted(str(name)[:64] for name in body.keys() - table.keys())
    if unknown:
        raise fault("HTTPBadRequest", why=f"Unrecognized attribute(s) '{', '.join(unknown)}'")
    found: Body = {}
    for name, attribute in table.items():
        if name in body:
            if not (attribute.post if new else attribute.put):
                way = "Attribute '{}' not allowed in POST" if new else "Cannot update read-only attribute {}"
                raise fault("HTTPBadRequest", why=way.format(name))
            found[name] = _value(name, attribute.read, body[name])
            if attribute.admin and not caller.is_admin and not (new and found[name] == attribute.default):
                raise fault("PolicyNotAuthorized", rule=f"(rule:{'create' if new else 'update'}_{noun}:{name})")
        elif new and attribute.default is REQUIRED:
            raise fault("HTTPBadRequest", why=f"Failed to parse request. Required attribute '{name}' not specified")
        elif new and attribute.default is not UNSET:
            found[name] = attribute.default
    return found


def columns(body: Mapping[str, Any], table: Mapping[str, Attribute]) -> Body:
    """The attributes of `body` under the names of their columns."""
    return {table[name].column or name: value for name, value in body.items()}


def _value(name: str, read: Read, value: object) -> Any:
    try:
        return read(value)
    except (ValueError, TypeError) as error:
        raise fault("HTTPBadRequest", why=f"Invalid input for {name}. Reason: {error}.") from error


def text(size: int = 255, pattern: str = "") -> Read:
    """A string of at most `size` characters, all of it matching `pattern`."""
    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"'{str(value)[:64]}' is not a valid string")
        if len(value) > size:
            raise ValueError(f"'{value[:64]}...' exceeds maximum length of {size}")
        if pattern and not re.fullmatch(pattern, value):
            raise ValueError(f"'{value[:64]}' does not match {pattern}")
        return value
    return read


def truth(value: Any) -> bool:
    """True or false, or a word for it."""
    found = value if isinstance(value, bool) else TRUTHS.get(str(value).lower())
    if found is None:
        raise ValueError(f"'{str(value)[:64]}' cannot be converted to boolean")
    return found


def number(low: int, high: int) -> Read:
    """A whole number from `low` to `high`, also as a string."""
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str) or not re.fullmatch(r"-?\d{1,12}", str(value)):
            raise ValueError(f"'{str(value)[:64]}' is not an integer")
        if not low <= int(value) <= high:
            raise ValueError(f"'{value}' must be from {low} to {high}")
        return int(value)
    return read


def one_of(*choices: Any) -> Read:
    """One of these values."""
    def read(value: Any) -> Any:
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return choice
        raise ValueError(f"'{str(value)[:64]}' is not in {list(choices)}")
    return read


def optional(read: Read) -> Read:
    """What `read` takes, or null."""
    return lambda value: None if value is None else read(value)


def emptied(read: Read, empty: Any) -> Read:
    """What `read` takes; null stands for `empty`."""
    return lambda value: empty if value is None else read(value)


def listed(read: Read, size: int = 200) -> Read:
    """A list of at most `size` of what `read` takes, without repetitions."""
    def read_all(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError(f"'{str(value)[:64]}' is not a list")
        if len(value) > size:
            raise ValueError(f"more than {size} items")
        found = [read(item) for item in value]
        if any(item in found[:place] for place, item in enumerate(found)):
            raise ValueError(f"Duplicate items in the list: '{str(value)[:200]}'")
        return found
    return read_all


def mapping(**keys: Read) -> Read:
    """An object with some of these keys and no others."""
    def read(value: Any) -> Body:
        if not isinstance(value, dict):
            raise ValueError(f"'{str(value)[:64]}' is not a dictionary")
        unknown = sorted(value.keys() - keys.keys())
        if unknown:
            raise ValueError(f"'{unknown[0][:64]}' is not an expected key")
        return {name: keys[name](value[name]) for name in keys if name in value}
    return read


def free_mapping(value: Any) -> Body:
    """Any object, of bounded size."""
    if not isinstance(value, dict) or len(str(value)) > 4095:
        raise ValueError("it must be a dictionary of at most 4095 characters")
    return value


def address(value: Any) -> str:
    """An IP address, in its shortest form."""
    if not isinstance(value, str):
        raise ValueError(f"'{str(value)[:64]}' is not a valid IP address")
    try:
        return str(ipaddress.ip_address(value))
    except ValueError as error:
        raise ValueError(f"'{value[:64]}' is not a valid IP address") from error


def cidr(value: Any) -> str:
    """A network in its shortest form; bits of a host are dropped."""
    try:
        return str(ipaddress.ip_network(text()(value), strict=False))
    except ValueError as error:
        raise ValueError(f"'{str(value)[:64]}' is not a valid IP subnet") from error


def prefix(value: Any) -> str:
    """A network, or a host's address with the length of its network, which stays as it is told."""
    try:
        return str(ipaddress.ip_interface(text()(value)))
    except ValueError as error:
        raise ValueError(f"'{str(value)[:64]}' is not a valid IP subnet") from error


def mac(value: Any) -> str:
    """A MAC address of one station, in lower case."""
    found = text()(value).lower().replace("-", ":")
    if not MAC.fullmatch(found) or int(found[:2], 16) & 1 or found == "00:00:00:00:00:00":
        raise ValueError(f"'{found[:64]}' is not a valid MAC address of one station")
    return str(found)


identifier = text(64, r"[0-9A-Za-z_-]{1,64}")
words = emptied(text(255), "")
STANDARD = {
    "name": Attribute(words, ""),
    "description": Attribute(words, ""),
    "project_id": Attribute(identifier, put=False),
}
"""What every noun has."""
