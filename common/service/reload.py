# SPDX-License-Identifier: Apache-2.0
"""Reload of the configuration on SIGHUP.

Options that can change at run time take effect, and one log line lists the options that need a
restart. A file with an error changes nothing. ``SECTIONS`` lists the sections of each process.
Modules register options that can change at run time with ``takes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from oslo_config import cfg

from common.domain import errors
from common.service import config, config_file, log

logger = log.get_logger(__name__)
#: Sections that all processes read.
OF_ALL = ("DEFAULT", "log", "prometheus", "tls", "tracing")
#: The other sections that each process reads. Changes in other sections do not concern it.
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
#: Options that IdentityClient reads at each use.
OF_IDENTITY = (
    "identity.*",
    "image.endpoint",
    "network.endpoint",
    "share.endpoint",
    "volume.endpoint",
)


#: Patterns of options that can change at run time, with the callback for changes.
_callbacks: list[tuple[tuple[str, ...], Callable[[cfg.ConfigOpts], None]]] = [
    (
        ("DEFAULT.log_level", "log.format"),
        lambda conf: log.start(conf.log_level, conf.log.format),
    )
]


#: Options whose callback failed. The next reload tries them again.
_refused: set[str] = set()


def takes(*options: str, then: Callable[[cfg.ConfigOpts], None] = lambda conf: None) -> None:
    """Register options that can change at run time.

    Args:
        options: Patterns, for example ``identity.*``.
        then: Applies the new values. ``again`` calls this function if one of the options has
            changed, or was refused at the last reload. May raise ConfigError, which refuses the
            values. Default: no effect, for options that are read at each use.
    """
    _callbacks.append((options, then))


def again(process: str, *after_a_restart: str) -> None:
    """Reload the configuration file, apply the changed options and log the result.

    An error in the file is logged, and no value changes. If a callback registered with ``takes``
    raises ConfigError, the error is logged and the log line lists the callback's changed options as
    refused. The next reload tries these options again.

    Args:
        process: Key of ``SECTIONS``. Changes in sections that the process does not read are
            ignored.
        after_a_restart: Patterns of options that need a restart although a pattern registered with
            ``takes`` matches.
    """
    try:
        changed = [name for name in config.reread(process) if _section(name) in _sections(process)]
    except errors.ConfigError as problem:
        logger.error(
            "the configuration stays as it was, because the file is invalid", problem=problem
        )
        return
    changed += sorted(_refused.difference(changed))
    _refused.clear()
    for options, then in _callbacks:
        names = [name for name in changed if _matches(name, options)]
        if names:
            try:
                then(config.CONF)
            except errors.ConfigError as problem:
                logger.error(
                    "options stay as they were, because the new values are refused",
                    options=", ".join(options),
                    problem=problem,
                )
                _refused.update(names)
    live_options = [option for options, _ in _callbacks for option in options]
    needs_restart = [
        name
        for name in changed
        if _matches(name, after_a_restart) or not _matches(name, live_options)
    ]
    _refused.difference_update(needs_restart)
    in_force = [name for name in changed if name not in needs_restart and name not in _refused]
    refused = [name for name in changed if name in _refused]
    logger.info(
        "the configuration was read again",
        in_force=", ".join(in_force),
        refused=", ".join(refused),
        needs_restart=", ".join(needs_restart),
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _section(name: str) -> str:
    return name.partition(".")[0]


def _sections(process: str) -> list[str]:
    return [*OF_ALL, *SECTIONS[process].split(), *config_file.LIBRARIES, *config_file.LOGINS]
