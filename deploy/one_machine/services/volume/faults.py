# SPDX-License-Identifier: Apache-2.0
"""The errors of the volume service, with Cinder's texts and shape.

The shape is {"badRequest": {"code", "message"}}. `fault("VolumeNotFound", id=key)` returns the
error to raise. Clients act on the status.
"""

from collections.abc import Mapping

import falcon

from deploy.one_machine.services.faults import FaultTable
from deploy.one_machine.services.web import answer

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

#: Status -> kind -> message.
FAULTS: Mapping[int, Mapping[str, str]] = {
    400: {
        "BadRequest": "{why}",
        "InvalidInput": "Invalid input received: {why}",
        "InvalidVolume": "Invalid volume: {why}",
        "InvalidSnapshot": "Invalid snapshot: {why}",
        "InvalidAvailabilityZone": "Availability zone '{id}' is invalid.",
        "ImageUnacceptable": "Image {id} is unacceptable: {why}",
        "TypeIsDefault": "The volume type {id} is a default volume type and cannot be deleted.",
        "TypeInUse": "Volume Type {id} deletion is not allowed with volumes present with the type.",
    },
    403: {
        "Forbidden": "Policy doesn't allow {action} to be performed.",
    },
    404: {
        "VolumeNotFound": "Volume {id} could not be found.",
        "SnapshotNotFound": "Snapshot {id} could not be found.",
        "TypeNotFound": "Volume type {id} could not be found.",
        "AttachmentNotFound": "Volume attachment could not be found with filter: attachment_id = {id}.",
        "BackupNotFound": "Backup {id} could not be found.",
        "VersionNotFound": "API version {version} is not supported on this method.",
    },
    406: {
        "NotAcceptable": "Version {version} is not supported by the API. Minimum is {minimum} and"
        " maximum is {maximum}.",
    },
    409: {
        "Conflict": "Resource conflict: {why}",
        "InUseByServer": "Detach volume from instance {server} using the Compute API.",
    },
    413: {
        "VolumeLimitExceeded": "VolumeLimitExceeded: Maximum number of volumes allowed ({allowed})"
        " exceeded for quota '{name}'.",
        "SnapshotLimitExceeded": "SnapshotLimitExceeded: Maximum number of snapshots allowed ({allowed}) exceeded.",
        "GigabytesExceeded": "VolumeSizeExceedsAvailableQuota: Requested volume or snapshot exceeds"
        " allowed {name} quota. Requested {requested}G, quota is {allowed}G and"
        " {used}G has been consumed.",
        "SizeExceedsLimit": "VolumeSizeExceedsLimit: Requested volume size {size}G is larger than"
        " maximum allowed limit {allowed}G.",
    },
    503: {
        "Unavailable": "{why}",
    },
}
#: Return the error of a kind. All words in braces need a value.
fault = FaultTable(FAULTS).fault


def write_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError) -> None:
    """Set the body of an error response in Cinder's form: {name of the status: {"code", …}}."""
    message = error.description or str(error.title or "The server refused the request.")
    name = NAMES.get(error.status_code, "computeFault")
    answer(resp, {name: {"code": error.status_code, "message": message}})
