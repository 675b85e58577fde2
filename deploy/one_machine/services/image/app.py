# SPDX-License-Identifier: Apache-2.0
"""The routes of the image service, all in one list, behind keystonemiddleware."""

from deploy.one_machine.services.guard import HeaderAuthentication
from deploy.one_machine.services.image.caller import ImageCaller, is_open
from deploy.one_machine.services.image.documents import ImageSchemas, ImageVersions
from deploy.one_machine.services.image.images import ImageCollection, ImageFile, ImageItem
from deploy.one_machine.services.image.store import ImageStore
from deploy.one_machine.services.web import App, application


def build(store: ImageStore) -> App:
    """Return the app without keystonemiddleware. The app trusts the headers of the middleware."""
    app = application([HeaderAuthentication(is_open, ImageCaller)])
    versions, image = ImageVersions(), ImageItem(store)
    app.add_route("/", versions)
    app.add_route("/versions", versions)
    app.add_route("/v2", versions)
    app.add_route("/v2/images", ImageCollection(store))
    app.add_route("/v2/images/{key}", image)
    app.add_route("/v2/images/{key}/file", ImageFile(store))
    app.add_route("/v2/images/{key}/tasks", image, suffix="tasks")
    app.add_route("/v2/schemas/{noun}", ImageSchemas())
    return app
