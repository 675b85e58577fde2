# SPDX-License-Identifier: Apache-2.0
"""The routes of the image service, all in one list, behind keystonemiddleware."""

from deploy.standalone.guard import HeaderAuthentication
from deploy.standalone.image.caller import ImageCaller, is_open
from deploy.standalone.image.documents import ImageSchemas, ImageVersions, StoreInfo
from deploy.standalone.image.images import ImageCollection, ImageFile, ImageItem
from deploy.standalone.image.members import ImageMembers
from deploy.standalone.image.store import ImageStore
from deploy.standalone.web import App, application


def build(store: ImageStore) -> App:
    """The application by itself: it believes the headers that the middleware sets."""
    app = application([HeaderAuthentication(is_open, ImageCaller)])
    versions, info = ImageVersions(), StoreInfo()
    image, members = ImageItem(store), ImageMembers(store)
    app.add_route("/", versions)
    app.add_route("/versions", versions)
    app.add_route("/v2", versions)
    app.add_route("/v2/images", ImageCollection(store))
    app.add_route("/v2/images/{key}", image)
    app.add_route("/v2/images/{key}/file", ImageFile(store))
    app.add_route("/v2/images/{key}/tasks", image, suffix="tasks")
    app.add_route("/v2/images/{key}/actions/{switch}", image, suffix="switch")
    app.add_route("/v2/images/{key}/tags/{tag}", image, suffix="tag")
    app.add_route("/v2/images/{key}/members", members)
    app.add_route("/v2/images/{key}/members/{member}", members, suffix="one")
    app.add_route("/v2/schemas/{noun}", ImageSchemas())
    app.add_route("/v2/info/stores", info, suffix="stores")
    app.add_route("/v2/info/import", info, suffix="import")
    return app
