# SPDX-License-Identifier: Apache-2.0
"""CPU microseconds that logs and metrics add to a request: ``python -m tests.bench.edge``.

The benchmark calls a minimal application alone, with access logs, and with metrics. Log lines go to
a file.
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
        """Answer with the same text to each request."""
        resp.text = "well"


def minimal_application() -> WSGIApplication:
    """Return a minimal application with Kilonova's request class and request ids."""
    app: Any = falcon.App(request_type=HttpRequest, middleware=[RequestIds("X-Id")])
    app.add_route("/v2.1/servers/{server_id}", Thing())
    application: WSGIApplication = app
    return application


def cost(application: WSGIApplication) -> float:
    """Return the CPU microseconds of a request, the minimum of several tries."""
    environ: dict[str, Any] = {"PATH_INFO": "/v2.1/servers/70a599e0-31e7-49b7-b260-868f441e862b"}
    setup_testing_defaults(environ)

    def once() -> float:
        start = time.process_time()
        for _ in range(ROUNDS):
            application(dict(environ), lambda *arguments: None)  # type: ignore[arg-type,return-value]
        return (time.process_time() - start) / ROUNDS * 1e6

    return min(once() for _ in range(TRIES))


def main() -> None:
    """Measure all cases and print the figures."""
    with tempfile.TemporaryFile("w") as file:
        sys.stderr = file

        def log_at(level: str, form: str) -> Callable[[], WSGIApplication]:
            def make() -> WSGIApplication:
                log.start(level, form)
                return access_log.log_requests(minimal_application())

            return make

        def log_and_count() -> WSGIApplication:
            conf = cfg.ConfigOpts()
            conf.register_opts(config.OPTIONS["prometheus"], group="prometheus")
            conf([], default_config_files=[], default_config_dirs=[])
            conf.set_override("enabled", True, group="prometheus")
            metrics.start(conf, "api")
            return log_at("INFO", log.TEXT)()

        for name, make in {
            "bare": minimal_application,
            "log, at WARNING": log_at("WARNING", log.TEXT),
            "log, text": log_at("INFO", log.TEXT),
            "log, json": log_at("INFO", log.JSON),
            "log, text, metrics": log_and_count,
        }.items():
            print(f"{name:20} {cost(make()):7.1f} µs", flush=True)


if __name__ == "__main__":
    main()
