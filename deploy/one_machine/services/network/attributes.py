# SPDX-License-Identifier: Apache-2.0
"""The attributes of Neutron's resources: their JSON schemas, defaults, and who may set them."""

from dataclasses import dataclass
from functools import cached_property

from deploy.one_machine.services.json_types import JsonValue
from deploy.one_machine.services.network.caller import NetworkCaller
from deploy.one_machine.services.network.faults import malformed
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import (
    TRUTH,
    BodySchema,
    Document,
    array,
    integer,
    mapping,
    nullable,
    one_of,
    text,
)

REQUIRED, UNSET = object(), object()
NAME = text(null_is="")
ID = text(64, pattern=r"^[0-9A-Za-z_-]{1,64}$")
ADDRESS, CIDR = text(64, format="ip-address"), text(64, format="cidr")
TAGS = array(text(255, pattern=r"^[^,/]{1,255}$"), 50)
FIXED_IPS = nullable(array(mapping({"subnet_id": ID, "ip_address": ADDRESS}), 20))
PROFILE = {"type": "object", "maxProperties": 64, "null_is": {}}
ROUTES = {**array(mapping({"destination": CIDR, "nexthop": ADDRESS}), 30), "null_is": []}
ZONES = array(one_of("nova"), 1)


def number(minimum: int, maximum: int) -> Document:
    """A whole number, also as a string."""
    return integer(minimum, maximum, format="integer")


@dataclass(frozen=True)
class Attribute:
    """One attribute of a resource."""

    schema: Document
    #: of a new one; REQUIRED when it must be given, UNSET when the resource decides
    default: JsonValue = UNSET
    post: bool = True  #: may be given when it is made
    put: bool = True  #: may be changed
    admin: bool = False  #: only an admin may give another value than the default
    hidden: bool = False  #: only an admin sees it
    column: str = ""  #: where it is stored, if not under its own name


class Attributes(dict[str, Attribute]):
    """Those of one resource."""

    @cached_property
    def schema(self) -> BodySchema:
        """Of a body that holds any of them."""
        return BodySchema(mapping({name: attribute.schema for name, attribute in self.items()}))

    def validate(self, body: object, name: str, caller: NetworkCaller, *, new: bool) -> Body:
        """A body, filled up with defaults if it is new. Raises 400 naming the attribute, 403 for an
        admin's."""
        if isinstance(body, dict) and body.get("tenant_id") == body.get(
            "project_id", body.get("tenant_id")
        ):
            body = dict(body)
            if "tenant_id" in body:
                body["project_id"] = body.pop("tenant_id")
        given: Body = self.schema.validate(body, name)
        for key, attribute in self.items():
            why = ""
            if key in given:
                if new and not attribute.post:
                    why = f"Attribute '{key}' not allowed in POST"
                elif not new and not attribute.put:
                    why = f"Cannot update read-only attribute {key}"
                elif attribute.admin and not (new and given[key] == attribute.default):
                    caller.require_admin(f"(rule:{'create' if new else 'update'}_{name}:{key})")
            elif new and attribute.default is REQUIRED:
                why = f"Failed to parse request. Required attribute '{key}' not specified"
            if why:
                raise malformed(why)
        defaults = {
            key: attribute.default
            for key, attribute in self.items()
            if new and attribute.default is not UNSET
        }
        return defaults | given


#: What nearly every resource has.
STANDARD = {
    "name": Attribute(NAME, ""),
    "description": Attribute(NAME, ""),
    "project_id": Attribute(ID, put=False),
}
ADMIN_STATE_UP = Attribute(TRUTH, True)
