# SPDX-License-Identifier: Apache-2.0
"""The routes of the volume service, all in one list, behind keystonemiddleware.

Each is also served with the project's id behind /v3, as older clients have it (versions.py).
"""

from deploy.standalone.volume.attachments import VolumeAttachments
from deploy.standalone.volume.caller import VolumeAuthentication, is_open
from deploy.standalone.volume.documents import EMPTY, NothingHere, VolumeDocuments
from deploy.standalone.volume.faults import write_error
from deploy.standalone.volume.metadata import PairsOf
from deploy.standalone.volume.quotas import QuotaClasses, VolumeLimits, VolumeQuotas
from deploy.standalone.volume.schema import snapshots, volumes
from deploy.standalone.volume.service import VolumeService
from deploy.standalone.volume.snapshots import SnapshotCollection, SnapshotItem, SnapshotsApi
from deploy.standalone.volume.transfers import VolumeTransfers
from deploy.standalone.volume.types import (
    DefaultTypes,
    ExtraSpecs,
    TypeCollection,
    TypeItem,
    TypesApi,
)
from deploy.standalone.volume.versions import Microversions, VolumeVersions
from deploy.standalone.volume.volume_actions import VolumeActions
from deploy.standalone.volume.volumes import VolumeCollection, VolumeItem, VolumesApi
from deploy.standalone.web import App, application


def build(service: VolumeService) -> App:
    """The application by itself: it believes the headers that the middleware sets."""
    app = application([VolumeAuthentication(is_open), Microversions()])
    app.set_error_serializer(write_error)
    app.add_route("/", VolumeVersions())
    app.add_route("/v3", VolumeVersions())
    _add_volumes(app, service)
    _add_types(app, service)
    uses = VolumeAttachments(service)
    app.add_route("/v3/attachments", uses)
    app.add_route("/v3/attachments/detail", uses, suffix="detail")
    app.add_route("/v3/attachments/{key}", uses, suffix="one")
    app.add_route("/v3/attachments/{key}/action", uses, suffix="action")
    for path, minor in (("volume-transfers", 55), ("os-volume-transfer", 0)):
        transfers = VolumeTransfers(service, minor)
        app.add_route(f"/v3/{path}", transfers)
        app.add_route(f"/v3/{path}/detail", transfers, suffix="detail")
        app.add_route(f"/v3/{path}/{{key}}", transfers, suffix="one")
        app.add_route(f"/v3/{path}/{{key}}/accept", transfers, suffix="accept")
    quotas, documents = VolumeQuotas(service), VolumeDocuments(service)
    app.add_route("/v3/os-quota-sets/{project_id}", quotas)
    app.add_route("/v3/os-quota-sets/{project_id}/defaults", quotas, suffix="defaults")
    app.add_route("/v3/os-quota-class-sets/{name}", QuotaClasses(service))
    app.add_route("/v3/limits", VolumeLimits(service))
    app.add_route("/v3/os-availability-zone", documents, suffix="zones")
    app.add_route("/v3/os-services", documents, suffix="services")
    app.add_route("/v3/os-hosts", documents, suffix="hosts")
    app.add_route("/v3/scheduler-stats/get_pools", documents, suffix="pools")
    app.add_route("/v3/extensions", documents, suffix="extensions")
    app.add_route("/v3/extensions/{alias}", documents, suffix="extension")
    app.add_route("/v3/resource_filters", documents, suffix="filters")
    for path in EMPTY:
        nothing = NothingHere(path)
        app.add_route(f"/v3/{path}", nothing)
        app.add_route(f"/v3/{path}/{{key}}", nothing, suffix="one")
    return app


def _add_volumes(app: App, service: VolumeService) -> None:
    of_volumes, of_snapshots = VolumesApi(service), SnapshotsApi(service)
    collection, shelf = (
        VolumeCollection(service, of_volumes),
        SnapshotCollection(service, of_snapshots),
    )
    snapshot = SnapshotItem(service, of_snapshots)
    app.add_route("/v3/volumes", collection)
    app.add_route("/v3/volumes/detail", collection, suffix="detail")
    app.add_route("/v3/volumes/summary", collection, suffix="summary")
    app.add_route("/v3/volumes/{key}", VolumeItem(service, of_volumes))
    app.add_route("/v3/volumes/{key}/action", VolumeActions(service))
    app.add_route("/v3/snapshots", shelf)
    app.add_route("/v3/snapshots/detail", shelf, suffix="detail")
    app.add_route("/v3/snapshots/{key}", snapshot)
    app.add_route("/v3/snapshots/{key}/action", snapshot, suffix="action")
    for plural, table, missing in (
        ("volumes", volumes, "VolumeNotFound"),
        ("snapshots", snapshots, "SnapshotNotFound"),
    ):
        pairs = PairsOf(service, table, missing)
        app.add_route(f"/v3/{plural}/{{key}}/metadata", pairs)
        app.add_route(f"/v3/{plural}/{{key}}/metadata/{{name}}", pairs, suffix="one")


def _add_types(app: App, service: VolumeService) -> None:
    api = TypesApi()
    item, specs, defaults = TypeItem(service, api), ExtraSpecs(service, api), DefaultTypes(service)
    app.add_route("/v3/types", TypeCollection(service, api))
    app.add_route("/v3/types/{key}", item)
    app.add_route("/v3/types/{key}/action", item, suffix="action")
    app.add_route("/v3/types/{key}/os-volume-type-access", item, suffix="access")
    app.add_route("/v3/types/{key}/encryption", item, suffix="encryption")
    app.add_route("/v3/types/{key}/extra_specs", specs)
    app.add_route("/v3/types/{key}/extra_specs/{name}", specs, suffix="one")
    app.add_route("/v3/default-types", defaults)
    app.add_route("/v3/default-types/{project_id}", defaults, suffix="one")
