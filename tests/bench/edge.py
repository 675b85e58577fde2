# SPDX-License-Identifier: Apache-2.0
"""What the edge adds to a request, in microseconds of CPU: ``python -m tests.bench.edge``.

The least application, bare and with each thing around it that every request pays for; lines go to a
file. Beside it a list of no servers through the whole Compute API on SQLite, for comparison.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any
from wsgiref.types import WSGIApplication
from wsgiref.util import setup_testing_defaults

import falcon
from oslo_config import cfg

from common.service import config, log, metrics
from compute_api.http import access_log
from compute_api.http.middleware import HttpRequest, RequestIds

ROUNDS, TRIES = 5000, 5


class Thing:
    def on_get(self, req: HttpRequest, resp: falcon.Response, **params: str) -> None:
        """The least that a handler can do."""
        resp.text = "well"


def least() -> WSGIApplication:
    """The least application of ours."""
    app: Any = falcon.App(request_type=HttpRequest, middleware=[RequestIds("X-Id")])
    app.add_route("/v2.1/servers/{server_id}", Thing())
    application: WSGIApplication = app
    return application


def cost(application: WSGIApplication) -> float:
    """Microseconds of CPU that a request takes: the least of some tries."""
    asked: dict[str, Any] = {"PATH_INFO": "/v2.1/servers/70a599e0-31e7-49b7-b260-868f441e862b"}
    setup_testing_defaults(asked)

    def once() -> float:
        began = time.process_time()
        for _ in range(ROUNDS):
            application(dict(asked), lambda *said: None)  # type: ignore[arg-type,return-value]
        return (time.process_time() - began) / ROUNDS * 1e6

    return min(once() for _ in range(TRIES))


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryFile("w") as file:
        sys.stderr = file

        def logging_at(level: str, form: str) -> Callable[[], WSGIApplication]:
            def make() -> WSGIApplication:
                log.start(level, form)
                return access_log.log_requests(least())

            return make

        def counting() -> WSGIApplication:
            conf = cfg.ConfigOpts()
            conf.register_opts(config.OPTIONS["prometheus"], group="prometheus")
            conf([], default_config_files=[], default_config_dirs=[])
            conf.set_override("enabled", True, group="prometheus")
            metrics.start(conf, "api")
            return logging_at("INFO", log.TEXT)()

        for name, make in {
            "bare": least,
            "log, at WARNING": logging_at("WARNING", log.TEXT),
            "log, text": logging_at("INFO", log.TEXT),
            "log, json": logging_at("INFO", log.JSON),
            "log, text, metrics": counting,
        }.items():
            print(f"{name:20} {cost(make()):7.1f} µs", flush=True)


if __name__ == "__main__":
    main()
