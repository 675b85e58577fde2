# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: the configuration is read again, what can change is in force, and one line says what
needs a restart.

A file that is wrong changes nothing. Which sections a process reads stands in ``SECTIONS``; who can
take over new values says so with ``takes``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from oslo_config import cfg

from common.domain import errors
from common.service import config, config_file, log

logger = logging.getLogger(__name__)
#: What all processes read.
OF_ALL = ("DEFAULT", "log", "prometheus", "tls", "tracing")
#: What each process reads of the file beside: a change elsewhere is another process's.
SECTIONS = {
    "api": "database api http oslo_middleware conductor host_keys scheduler identity image network "
    "share volume console spice quota notifications",
    "placement": "database http oslo_middleware identity placement",
    "metadata": "database http oslo_middleware metadata vendor_data",
    "image-gateway": "http oslo_middleware identity image image_gateway",
    "console": "database host_keys identity console spice",
    "conductor": "database conductor host_keys ha scheduler agent image_gateway identity image network "
    "share volume notifications",
    "scheduler": "database scheduler metrics conductor notifications",
    "agent": "agent migration metadata spice vendor_data",
}
#: Read by IdentityClient whenever it asks.
OF_IDENTITY = (
    "identity.*",
    "image.endpoint",
    "network.endpoint",
    "share.endpoint",
    "volume.endpoint",
)


#: Options that can be taken over, with what is called when one of them has changed.
_taken: list[tuple[tuple[str, ...], Callable[[cfg.ConfigOpts], None]]] = [
    (
        ("DEFAULT.log_level", "log.format"),
        lambda conf: log.start(conf.log_level, conf.log.format),
    )
]


#: Options that their process could not take over. The next reload tries them again.
_refused: set[str] = set()


def takes(*options: str, then: Callable[[cfg.ConfigOpts], None] = lambda conf: None) -> None:
    """Changes of these options (``identity.*``) are in force in this process once ``then`` has been
    called, which raises ConfigError where it cannot take them over."""
    _taken.append((options, then))


def again(process: str, *after_a_restart: str) -> None:
    """Read the file again; nothing that stands in it ends the process. ``after_a_restart``: options
    that can not be taken over although ``takes`` has a pattern for them."""
    try:
        changed = [name for name in config.reread(process) if _section(name) in _sections(process)]
    except errors.ConfigError as problem:
        logger.error("the configuration stays as it was: %s", problem)
        return
    changed += sorted(_refused.difference(changed))
    _refused.clear()
    for options, then in _taken:
        names = [name for name in changed if _is_one(name, options)]
        if names:
            try:
                then(config.CONF)
            except errors.ConfigError as problem:
                logger.error("%s stays as it was: %s", ", ".join(options), problem)
                _refused.update(names)
    known = [option for options, _ in _taken for option in options]
    kept = [name for name in changed if _is_one(name, after_a_restart) or not _is_one(name, known)]
    _refused.difference_update(kept)
    in_force = [name for name in changed if name not in kept and name not in _refused]
    refused = [name for name in changed if name in _refused]
    logger.info(
        "the configuration was read again; in force: %s%s; after a restart: %s",
        ", ".join(in_force) or "nothing new",
        f"; refused: {', '.join(refused)}" if refused else "",
        ", ".join(kept) or "nothing more",
    )


def _is_one(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _section(name: str) -> str:
    return name.partition(".")[0]


def _sections(process: str) -> list[str]:
    return [*OF_ALL, *SECTIONS[process].split(), *config_file.LIBRARIES, *config_file.LOGINS]
