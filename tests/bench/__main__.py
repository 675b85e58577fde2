# SPDX-License-Identifier: Apache-2.0
"""Print all figures: ``python -m tests.bench`` or ``./deploy/test bench``."""

from __future__ import annotations

import sys

from tests.bench import claims, figures, scheduler

if __name__ == "__main__":
    scheduler.main()
    sys.exit(claims.main() or figures.main())
