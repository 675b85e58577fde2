# SPDX-License-Identifier: Apache-2.0
"""What an image's attributes may be, how JSON patches change them, and how an image is shown. Pure functions.

`checked` and `patched` return the columns to store; custom properties are strings and live in one JSON
column. Both raise the API's errors: 400 for a bad value, 403 for what is not the caller's to set, 409 for a
path that isn't there.
"""

from collections.abc import Mapping
from typing import Any

import falcon

from deploy.standalone.fields import Field, check
from deploy.standalone.image.caller import Caller

FIELDS = {
    "name": Field(str, null=True),
    "owner": Field(str, null=True),
    "protected": Field(bool),
    "os_hidden": Field(bool),
    "visibility": Field(str, choices=("public", "private", "shared", "community")),
    "container_format": Field(str, null=True, choices=("ami", "ari", "aki", "bare", "ovf", "ova", "docker")),
    "disk_format": Field(
        str,
        null=True,
        choices=(
            "ami",
            "ari",
            "aki",
            "vhd",
            "vhdx",
            "vmdk",
            "raw",
            "qcow2",
            "vdi",
            "iso",
            "ploop",
            "gpt",
            "qed",
        ),
    ),
    "min_disk": Field(int),
    "min_ram": Field(int),
    "tags": Field(list, size=128),
}
READ_ONLY = (
    "id",
    "status",
    "size",
    "virtual_size",
    "checksum",
    "os_hash_algo",
    "os_hash_value",
    "created_at",
    "updated_at",
    "self",
    "file",
    "schema",
    "direct_url",
    "locations",
    "stores",
    "deleted",
    "deleted_at",
)
TEXT = Field(str, size=65535)
PROPERTIES_MAX = 128
Columns = dict[str, Any]


def checked(body: Mapping[str, Any], caller: Caller) -> Columns:
    """The columns for a new or changed image from its attributes as the API has them."""
    fixed = sorted(set(READ_ONLY) & body.keys())
    if fixed:
        raise falcon.HTTPForbidden(description=f"Attribute '{fixed[0]}' is read-only.")
    check(body, FIELDS, "image", others=True)
    properties = {name: value for name, value in body.items() if name not in FIELDS}
    if len(properties) > PROPERTIES_MAX:
        raise falcon.HTTPContentTooLarge(description=f"An image has at most {PROPERTIES_MAX} properties.")
    for name, value in properties.items():
        if not 0 < len(name) <= 255:
            raise falcon.HTTPBadRequest(description="The name of a property must have 1 to 255 characters.")
        if complaint := TEXT.complaint(value):
            raise falcon.HTTPBadRequest(description=f"'image.{name}' {complaint}.")
    columns = {name: body[name] for name in FIELDS if name in body}
    if "tags" in columns:
        columns["tags"] = sorted({tag_of(tag) for tag in columns["tags"]})
    if columns.get("visibility") == "public":
        caller.require_admin("make an image public")
    if columns.get("owner", caller.project_id) != caller.project_id:
        caller.require_admin("give an image to another project")
    return columns | {"properties": properties}


def tag_of(value: object) -> str:
    """`value` if it may be a tag. Raises 400."""
    if complaint := Field(str, empty=False).complaint(value):
        raise falcon.HTTPBadRequest(description=f"A tag of 'image.tags' {complaint}.")
    return str(value)


def patched(image: Mapping[Any, Any], operations: object, caller: Caller) -> Columns:
    """The columns that a list of JSON-patch operations changes in `image` (a row)."""
    if not isinstance(operations, list):
        raise falcon.HTTPBadRequest(description="The request body must be a list of operations.")
    properties, changes = dict(image["properties"]), {}
    for operation in operations:
        verb, name, value = _operation(operation)
        if name in READ_ONLY:
            raise falcon.HTTPForbidden(description=f"Attribute '{name}' is read-only.")
        if name in FIELDS:
            if verb == "remove":
                raise falcon.HTTPForbidden(description=f"Property '{name}' cannot be removed.")
            changes[name] = value
            continue
        if verb != "add" and name not in properties:
            raise falcon.HTTPConflict(description=f"Property '{name}' does not exist.")
        if verb == "remove":
            del properties[name]
        else:
            properties[name] = value
    if image["status"] != "queued" and {"disk_format", "container_format"} & changes.keys():
        raise falcon.HTTPForbidden(description="The formats of an image with data are fixed.")
    if changes.get("visibility") == image["visibility"]:
        del changes["visibility"]
    return checked(properties | changes, caller)


def modern(operations: object) -> object:
    """Operations as API v2.0 wrote them, {"add": "/name", "value": …}, in today's form; what is neither stays, and is
    refused like all others."""
    if not isinstance(operations, list):
        return operations
    return [_modern(one) if isinstance(one, dict) else one for one in operations]


def _modern(operation: dict[str, Any]) -> dict[str, Any]:
    verbs = [verb for verb in ("add", "replace", "remove") if verb in operation]
    if len(verbs) != 1 or "op" in operation or "path" in operation:
        return {}
    rest = {name: value for name, value in operation.items() if name != verbs[0]}
    return {"op": verbs[0], "path": operation[verbs[0]], **rest}


def _operation(operation: object) -> tuple[str, str, Any]:
    """(verb, attribute, value) of one operation. Raises 400."""
    if not isinstance(operation, dict) or operation.get("op") not in ("add", "replace", "remove"):
        raise falcon.HTTPBadRequest(description="Each operation needs an 'op' of add, replace or remove.")
    path = operation.get("path")
    if not isinstance(path, str) or not path.startswith("/") or path.count("/") != 1 or len(path) < 2:
        raise falcon.HTTPBadRequest(
            description="Each operation needs a 'path' of one attribute, as in '/name'."
        )
    if operation["op"] != "remove" and "value" not in operation:
        raise falcon.HTTPBadRequest(description=f"The operation on '{path[:64]}' needs a 'value'.")
    return operation["op"], path[1:].replace("~1", "/").replace("~0", "~"), operation.get("value")


def view(image: Mapping[Any, Any]) -> dict[str, Any]:
    """A row as the API shows it."""
    own = {name: value for name, value in image.items() if name not in ("properties", "upload")}
    place = f"/v2/images/{image['id']}"
    return {
        **image["properties"],
        **own,
        "self": place,
        "file": f"{place}/file",
        "schema": "/v2/schemas/image",
    }
