# SPDX-License-Identifier: Apache-2.0
"""What a verb reported of its progress, as texts."""

from __future__ import annotations

from common.domain.command_progress import CommandProgress


class Phases(list[str]):
    """The first callback of a ``VerbContext``: it keeps the text of each report."""

    def __call__(self, progress: CommandProgress) -> None:
        self.append(str(progress))
