# SPDX-License-Identifier: Apache-2.0
"""The attributes of images: their schema, their changes by JSON patches, and their view.

The functions are pure. `validate` and `apply_patch` return the columns to store. Custom properties
are strings in one JSON column. Both raise the API's errors: 400 for an invalid value, 403 for an
attribute that the caller may not set, 409 for a missing path.
"""

import falcon

from deploy.one_machine.services.database import DbValues
from deploy.one_machine.services.image.caller import ImageCaller
from deploy.one_machine.services.resource import Body
from deploy.one_machine.services.schemas import (
    BOOLEAN,
    NOT_EMPTY,
    BodySchema,
    integer,
    mapping,
    nullable,
    one_of,
    text,
)

TAG, PROPERTY, MAX_PROPERTIES = text(pattern=NOT_EMPTY), text(65535), 128
ATTRIBUTES = {
    "name": nullable(text()),
    "owner": nullable(text()),
    "protected": BOOLEAN,
    "os_hidden": BOOLEAN,
    "visibility": one_of("public", "private", "shared", "community"),
    "container_format": nullable(one_of("ami", "ari", "aki", "bare", "ovf", "ova", "docker")),
    "disk_format": nullable(
        one_of(
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
        )
    ),
    "min_disk": integer(),
    "min_ram": integer(),
    "tags": {"type": "array", "items": TAG, "maxItems": 128},
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
IMAGE = {"type": "object", "properties": ATTRIBUTES, "additionalProperties": PROPERTY}
IMAGE_SCHEMA = BodySchema(IMAGE)
_TO = {"op": {}, "path": text(pattern=r"^/[^/]+$")}
OPERATIONS = BodySchema(
    {
        "type": "array",
        "items": {
            "oneOf": [
                mapping(
                    {**_TO, "op": one_of("add", "replace"), "value": {}}, *_TO, "value", others=True
                ),
                mapping({**_TO, "op": one_of("remove")}, *_TO, others=True),
            ]
        },
    }
)


def validate(body: object, caller: ImageCaller) -> Body:
    """Return the columns for a new or changed image from the attributes in a request.

    ``properties`` is always among the columns. Other missing attributes are left out.

    Args:
        body: The attributes, as in the API.
        caller: The caller.

    Raises:
        HTTPForbidden: An attribute is read-only, or only an admin may set the value: the visibility
            public, or an owner other than the caller's project.
        HTTPContentTooLarge: There are too many properties.
        HTTPBadRequest: A value is invalid.
    """
    read_only = sorted(set(READ_ONLY) & body.keys()) if isinstance(body, dict) else []
    if read_only:
        raise falcon.HTTPForbidden(description=f"Attribute '{read_only[0]}' is read-only.")
    attributes: Body = IMAGE_SCHEMA.validate(body, "image")
    properties = {name: value for name, value in attributes.items() if name not in ATTRIBUTES}
    if len(properties) > MAX_PROPERTIES:
        raise falcon.HTTPContentTooLarge(
            description=f"An image may have at most {MAX_PROPERTIES} properties."
        )
    if not all(0 < len(name) <= 255 for name in properties):
        raise falcon.HTTPBadRequest(
            description="The name of a property must have 1 to 255 characters."
        )
    columns = {name: attributes[name] for name in ATTRIBUTES if name in attributes}
    if "tags" in columns:
        columns["tags"] = sorted(set(columns["tags"]))
    if columns.get("visibility") == "public":
        caller.require_admin("make an image public")
    if columns.get("owner", caller.project_id) != caller.project_id:
        caller.require_admin("give an image to another project")
    return columns | {"properties": properties}


def apply_patch(image: DbValues, operations: object, caller: ImageCaller) -> Body:
    """Return the columns to store after a list of JSON-patch operations.

    Each operation changes an attribute or a custom property. ``properties`` is always among the
    columns.

    Args:
        image: The present row.
        operations: The operations.
        caller: The caller.

    Raises:
        HTTPForbidden: An attribute is read-only, cannot be removed, or is a format of an image that
            is not queued any more, or only an admin may set the value.
        HTTPConflict: A property to replace or remove does not exist.
        HTTPContentTooLarge: There are too many properties.
        HTTPBadRequest: An operation or a value is invalid.
    """
    properties, changes = dict(image["properties"]), {}
    for operation in OPERATIONS.validate(operations, "patch"):
        verb, name = operation["op"], operation["path"][1:].replace("~1", "/").replace("~0", "~")
        if name in READ_ONLY:
            raise falcon.HTTPForbidden(description=f"Attribute '{name}' is read-only.")
        if name in ATTRIBUTES:
            if verb == "remove":
                raise falcon.HTTPForbidden(description=f"Property '{name}' cannot be removed.")
            changes[name] = operation["value"]
            continue
        if verb != "add" and name not in properties:
            raise falcon.HTTPConflict(description=f"Property '{name}' does not exist.")
        if verb == "remove":
            del properties[name]
        else:
            properties[name] = operation["value"]
    if image["status"] != "queued" and {"disk_format", "container_format"} & changes.keys():
        raise falcon.HTTPForbidden(
            description="disk_format and container_format of an image can only be changed before the upload."
        )
    if changes.get("visibility") == image["visibility"]:
        del changes["visibility"]
    return validate(properties | changes, caller)


def convert_operations(operations: object) -> object:
    """Return operations of API v2.0, {"add": "/name", "value": …}, in the form of JSON patch.

    An operation in another form becomes {}. Values of other types are returned unchanged. The
    schema refuses both later.
    """
    return (
        [
            _convert_operation(operation) if isinstance(operation, dict) else operation
            for operation in operations
        ]
        if isinstance(operations, list)
        else operations
    )


def _convert_operation(operation: Body) -> Body:
    verbs = [verb for verb in ("add", "replace", "remove") if verb in operation]
    if len(verbs) != 1 or "op" in operation or "path" in operation:
        return {}
    rest = {name: value for name, value in operation.items() if name != verbs[0]}
    return {"op": verbs[0], "path": operation[verbs[0]], **rest}


def view(image: DbValues) -> Body:
    """Return the object in a response for the row of an image."""
    own = {name: value for name, value in image.items() if name not in ("properties", "upload")}
    path = f"/v2/images/{image['id']}"
    return {
        **image["properties"],
        **own,
        "self": path,
        "file": f"{path}/file",
        "schema": "/v2/schemas/image",
    }
