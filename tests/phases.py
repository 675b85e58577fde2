# SPDX-License-Identifier: Apache-2.0
"""A callback that records the progress of a verb as texts."""

from __future__ import annotations

from common.domain.command_progress import CommandProgress


class Phases(list[str]):
    """A list of progress texts, for use as the first callback of a ``VerbContext``."""

    def __call__(self, progress: CommandProgress) -> None:
        self.append(str(progress))
