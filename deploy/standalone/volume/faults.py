# SPDX-License-Identifier: Apache-2.0
"""What is refused, in Cinder's words and shape, {"badRequest": {"code", "message"}}.

`fault("VolumeNotFound", id=key)` makes the error to raise; clients decide by the status.
"""

import falcon

from deploy.standalone.web import answer

NAMES = {
    400: "badRequest",
    401: "unauthorized",
    403: "forbidden",
    404: "itemNotFound",
    405: "badMethod",
    409: "conflictingRequest",
    413: "overLimit",
    415: "badMediaType",
    501: "notImplemented",
    503: "serviceUnavailable",
}

#: name -> (status, message)
FAULTS = {
    "BadRequest": (400, "{why}"),
    "InvalidInput": (400, "Invalid input received: {why}"),
    "InvalidVolume": (400, "Invalid volume: {why}"),
    "InvalidSnapshot": (400, "Invalid snapshot: {why}"),
    "InvalidAvailabilityZone": (400, "Availability zone '{id}' is invalid."),
    "ImageUnacceptable": (400, "Image {id} is unacceptable: {why}"),
    "TypeIsDefault": (
        400,
        "The volume type {id} is a default volume type and cannot be deleted.",
    ),
    "TypeInUse": (
        400,
        "Volume Type {id} deletion is not allowed with volumes present with the type.",
    ),
    "Forbidden": (403, "Policy doesn't allow {action} to be performed."),
    "VolumeNotFound": (404, "Volume {id} could not be found."),
    "SnapshotNotFound": (404, "Snapshot {id} could not be found."),
    "TypeNotFound": (404, "Volume type {id} could not be found."),
    "AttachmentNotFound": (
        404,
        "Volume attachment could not be found with filter: attachment_id = {id}.",
    ),
    "BackupNotFound": (404, "Backup {id} could not be found."),
    "VersionNotFound": (404, "API version {version} is not supported on this method."),
    "NotAcceptable": (
        406,
        "Version {version} is not supported by the API. Minimum is {minimum} and maximum is"
        " {maximum}.",
    ),
    "Conflict": (409, "Resource conflict: {why}"),
    "InUseByServer": (
        409,
        "Detach volume from instance {server} using the Compute API.",
    ),
    "VolumeLimitExceeded": (
        413,
        "VolumeLimitExceeded: Maximum number of volumes allowed ({allowed}) exceeded for quota"
        " '{name}'.",
    ),
    "SnapshotLimitExceeded": (
        413,
        "SnapshotLimitExceeded: Maximum number of snapshots allowed ({allowed}) exceeded.",
    ),
    "GigabytesExceeded": (
        413,
        "VolumeSizeExceedsAvailableQuota: Requested volume or snapshot exceeds allowed {name}"
        " quota. Requested {requested}G, quota is {allowed}G and {used}G has been consumed.",
    ),
    "SizeExceedsLimit": (
        413,
        "VolumeSizeExceedsLimit: Requested volume size {size}G is larger than maximum allowed"
        " limit {allowed}G.",
    ),
    "Unavailable": (503, "{why}"),
}


def fault(kind: str, **values: object) -> falcon.HTTPError:
    """The error of this kind; what it names must be in `values`."""
    status, message = FAULTS[kind]
    headers = {"Retry-After": "0"} if status == 413 else None
    text = message.format(**{name: str(value)[:255] for name, value in values.items()})
    return falcon.HTTPError(status, description=text, headers=headers)


def write_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Give `error` the body that Cinder's clients read."""
    message = error.description or str(error.title or "The server refused the request.")
    name = NAMES.get(error.status_code, "computeFault")
    answer(resp, {name: {"code": error.status_code, "message": message}})
