# SPDX-License-Identifier: Apache-2.0
"""The routes of the image service, all in one list, behind keystonemiddleware."""


from deploy.standalone.guard import Authentication
from deploy.standalone.image.caller import OPEN, Caller
from deploy.standalone.image.documents import Info, Schemas, Versions
from deploy.standalone.image.images import Data, Image, Images
from deploy.standalone.image.members import Members
from deploy.standalone.image.shelf import Shelf
from deploy.standalone.web import App, application


def build(shelf: Shelf) -> App:
    """The application by itself: it believes the headers that the middleware sets."""
    app = application([Authentication(OPEN, Caller)])
    versions, image, members, info = Versions(), Image(shelf), Members(shelf), Info()
    app.add_route("/", versions)
    app.add_route("/versions", versions)
    app.add_route("/v2", versions)
    app.add_route("/v2/images", Images(shelf))
    app.add_route("/v2/images/{key}", image)
    app.add_route("/v2/images/{key}/file", Data(shelf))
    app.add_route("/v2/images/{key}/tasks", image, suffix="tasks")
    app.add_route("/v2/images/{key}/actions/{switch}", image, suffix="switch")
    app.add_route("/v2/images/{key}/tags/{tag}", image, suffix="tag")
    app.add_route("/v2/images/{key}/members", members)
    app.add_route("/v2/images/{key}/members/{member}", members, suffix="one")
    app.add_route("/v2/schemas/{noun}", Schemas())
    app.add_route("/v2/info/stores", info, suffix="stores")
    app.add_route("/v2/info/import", info, suffix="import")
    return app
