# SPDX-License-Identifier: Apache-2.0
"""Make the texts of a host's report printable and short before they are stored.

Tenants read errors of a host in faults, and operators read all its texts in a terminal. So a
compromised host must not control these texts. Values of a wrong type stay unchanged, because the
report is then processed part by part.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from common.domain.command_progress import CommandProgress
from common.domain.json_types import JsonObject
from common.domain.models import Result, Sync
from common.domain.text import one_line

#: Agents use the same limit.
MAX_DETAILS_CHARACTERS = 2000
MAX_VERB_CHARACTERS = 40


def clean(sync: Sync) -> Sync:
    """Return the report with printable, short texts.

    These are the error and details of results, the inventory, the reasons of cached images, and the
    stalled verb of a command's progress. The data of results, ids and the keys of commands stay
    unchanged.
    """
    changes: JsonObject = {}
    if sync.results:
        changes["results"] = [_clean_result(result) for result in sync.results]
    if sync.inventory is not None:
        changes["inventory"] = _clean_all(sync.inventory)
    if isinstance(sync.cached, dict) and sync.cached:
        changes["cached"] = {image: _clean_all(why) for image, why in sync.cached.items()}
    if isinstance(sync.phases, dict) and sync.phases:
        changes["phases"] = {key: _clean_progress(value) for key, value in sync.phases.items()}
    return replace(sync, **changes) if changes else sync


def _clean_result(result: Result) -> Result:
    return replace(
        result,
        error=_clean_text(result.error),
        details=_clean_text(result.details, MAX_DETAILS_CHARACTERS),
    )


def _clean_progress(progress: CommandProgress) -> CommandProgress:
    if not isinstance(progress, CommandProgress):
        return progress
    return replace(progress, stalled_verb=_clean_text(progress.stalled_verb, MAX_VERB_CHARACTERS))


def _clean_text(text: Any, *most: int) -> Any:
    return one_line(text, *most) if isinstance(text, str) else text


def _clean_all(value: Any) -> Any:
    """Return the value with all texts printable and short, including the keys of dicts."""
    if isinstance(value, dict):
        return {_clean_text(key): _clean_all(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean_all(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return replace(value, **{name: _clean_all(getattr(value, name)) for name in names})
    return _clean_text(value)
