# SPDX-License-Identifier: Apache-2.0
"""The routes of the volume service, all in one list, behind keystonemiddleware.

Each path also exists with the project's id behind /v3, for older clients (versions.py).
"""

from deploy.one_machine.services.guard import HeaderAuthentication
from deploy.one_machine.services.volume.attachments import VolumeAttachments
from deploy.one_machine.services.volume.caller import VolumeCaller, is_open
from deploy.one_machine.services.volume.documents import EMPTY, EmptyCollection, VolumeDocuments
from deploy.one_machine.services.volume.faults import write_error
from deploy.one_machine.services.volume.quotas import VolumeLimits, VolumeQuotas
from deploy.one_machine.services.volume.service import VolumeService
from deploy.one_machine.services.volume.snapshots import (
    SnapshotCollection,
    SnapshotItem,
    SnapshotsApi,
)
from deploy.one_machine.services.volume.types import TypeCollection, TypeItem, TypesApi
from deploy.one_machine.services.volume.versions import Microversions, VolumeVersions
from deploy.one_machine.services.volume.volume_actions import VolumeActions
from deploy.one_machine.services.volume.volumes import VolumeCollection, VolumeItem, VolumesApi
from deploy.one_machine.services.web import App, application


def build(service: VolumeService) -> App:
    """Return the app without keystonemiddleware. The app trusts the headers of the middleware."""
    app = application([HeaderAuthentication(is_open, VolumeCaller), Microversions()])
    app.set_error_serializer(write_error)
    app.add_route("/", VolumeVersions())
    app.add_route("/v3", VolumeVersions())
    _add_volumes(app, service)
    _add_types(app, service)
    attachments = VolumeAttachments(service)
    app.add_route("/v3/attachments", attachments)
    app.add_route("/v3/attachments/detail", attachments, suffix="detail")
    app.add_route("/v3/attachments/{key}", attachments, suffix="one")
    app.add_route("/v3/attachments/{key}/action", attachments, suffix="action")
    quotas, documents = VolumeQuotas(service), VolumeDocuments(service)
    app.add_route("/v3/os-quota-sets/{project_id}", quotas)
    app.add_route("/v3/os-quota-sets/{project_id}/defaults", quotas, suffix="defaults")
    app.add_route("/v3/limits", VolumeLimits(service))
    app.add_route("/v3/os-availability-zone", documents, suffix="zones")
    app.add_route("/v3/os-services", documents, suffix="services")
    app.add_route("/v3/extensions", documents, suffix="extensions")
    for path, (collection, minor) in EMPTY.items():
        empty = EmptyCollection(collection, minor)
        app.add_route(f"/v3/{path}", empty)
        app.add_route(f"/v3/{path}/detail", empty)
    return app


def _add_volumes(app: App, service: VolumeService) -> None:
    volumes, snapshots = VolumesApi(service), SnapshotsApi(service)
    collection, snapshot_collection = (
        VolumeCollection(service, volumes),
        SnapshotCollection(service, snapshots),
    )
    snapshot = SnapshotItem(service, snapshots)
    app.add_route("/v3/volumes", collection)
    app.add_route("/v3/volumes/detail", collection, suffix="detail")
    app.add_route("/v3/volumes/{key}", VolumeItem(service, volumes))
    app.add_route("/v3/volumes/{key}/action", VolumeActions(service))
    app.add_route("/v3/snapshots", snapshot_collection)
    app.add_route("/v3/snapshots/detail", snapshot_collection, suffix="detail")
    app.add_route("/v3/snapshots/{key}", snapshot)
    app.add_route("/v3/snapshots/{key}/action", snapshot, suffix="action")


def _add_types(app: App, service: VolumeService) -> None:
    api = TypesApi()
    item = TypeItem(service, api)
    app.add_route("/v3/types", TypeCollection(service, api))
    app.add_route("/v3/types/{key}", item)
    app.add_route("/v3/types/{key}/encryption", item, suffix="encryption")
    app.add_route("/v3/types/{key}/extra_specs", item, suffix="extra_specs")
