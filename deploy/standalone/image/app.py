# SPDX-License-Identifier: Apache-2.0
"""The routes of the image service, all in one list, behind keystonemiddleware."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from keystonemiddleware.auth_token import AuthProtocol

from deploy.standalone.image.caller import OPEN, Authentication
from deploy.standalone.image.documents import Info, Schemas, Versions
from deploy.standalone.image.images import Data, Image, Images
from deploy.standalone.image.members import Members
from deploy.standalone.image.shelf import Shelf
from deploy.standalone.web import App, application


def guarded(app: App, identity: Mapping[str, Any]) -> Callable[..., Any]:
    """`app` behind keystonemiddleware's auth_token, whose options `identity` holds; version documents are in front."""
    # It warns of every option that belongs to its authentication plugin.
    logging.getLogger("keystonemiddleware._common.config").setLevel(logging.ERROR)
    behind = AuthProtocol(app, dict(identity))

    def choose(environ: dict[str, Any], start_response: Any) -> Any:
        return (app if environ["PATH_INFO"] in OPEN else behind)(environ, start_response)

    return choose


def build(shelf: Shelf) -> App:
    """The application by itself: it believes the headers that the middleware sets."""
    app = application([Authentication()])
    versions, image, members, info = Versions(), Image(shelf), Members(shelf), Info()
    app.add_route("/", versions)
    app.add_route("/versions", versions)
    app.add_route("/v2", versions)
    app.add_route("/v2/images", Images(shelf))
    app.add_route("/v2/images/{key}", image)
    app.add_route("/v2/images/{key}/file", Data(shelf))
    app.add_route("/v2/images/{key}/actions/{switch}", image, suffix="switch")
    app.add_route("/v2/images/{key}/tags/{tag}", image, suffix="tag")
    app.add_route("/v2/images/{key}/members", members)
    app.add_route("/v2/images/{key}/members/{member}", members, suffix="one")
    app.add_route("/v2/schemas/{noun}", Schemas())
    app.add_route("/v2/info/stores", info, suffix="stores")
    app.add_route("/v2/info/import", info, suffix="import")
    return app
