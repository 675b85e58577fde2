# SPDX-License-Identifier: Apache-2.0
"""The attributes of Neutron's resources: JSON schemas, defaults, and permissions to set them."""

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
    """Return the schema of an integer. A request may also send its digits as a string."""
    return integer(minimum, maximum, format="integer")


@dataclass(frozen=True)
class Attribute:
    """An attribute of a resource.

    Attributes:
        schema: The JSON schema of the value.
        default: The value in a new object. REQUIRED if the request must have a value, UNSET if the
            resource decides.
        post: True if a create request may contain the attribute.
        put: True if changes are permitted.
        admin: True if only an admin may give a value. In a create request other callers may give
            the default.
        hidden: True if only an admin sees the attribute.
        column: The column, or "" if it is that of the attribute's name.
    """

    schema: Document
    default: JsonValue = UNSET
    post: bool = True
    put: bool = True
    admin: bool = False
    hidden: bool = False
    column: str = ""


class Attributes(dict[str, Attribute]):
    """The attributes of a resource."""

    @cached_property
    def schema(self) -> BodySchema:
        """The schema of a body with any of the attributes."""
        return BodySchema(mapping({name: attribute.schema for name, attribute in self.items()}))

    def validate(self, body: object, name: str, caller: NetworkCaller, *, new: bool) -> Body:
        """Return a body in its canonical form. A new object gets default values.

        `tenant_id` becomes `project_id`.

        Args:
            body: The body.
            name: The name of the resource in errors.
            caller: The caller.
            new: True for a new object, False for a change.

        Raises:
            Fault: 400, an attribute is missing or not allowed. 403, an attribute is reserved for
                admins.
            HTTPBadRequest: The body does not match the schema.
        """
        if isinstance(body, dict) and body.get("tenant_id") == body.get(
            "project_id", body.get("tenant_id")
        ):
            body = dict(body)
            if "tenant_id" in body:
                body["project_id"] = body.pop("tenant_id")
        values: Body = self.schema.validate(body, name)
        for key, attribute in self.items():
            why = ""
            if key in values:
                if new and not attribute.post:
                    why = f"Attribute '{key}' not allowed in POST"
                elif not new and not attribute.put:
                    why = f"Cannot update read-only attribute {key}"
                elif attribute.admin and not (new and values[key] == attribute.default):
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
        return defaults | values


#: The attributes of most resources.
STANDARD = {
    "name": Attribute(NAME, ""),
    "description": Attribute(NAME, ""),
    "project_id": Attribute(ID, put=False),
}
ADMIN_STATE_UP = Attribute(TRUTH, True)
