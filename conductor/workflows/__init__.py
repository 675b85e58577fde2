# SPDX-License-Identifier: Apache-2.0
"""The registry: every workflow by its name. One story a file."""
from __future__ import annotations

from conductor.saga import Workflow
from conductor.workflows import create, delete, power

WORKFLOWS: dict[str, Workflow] = {workflow.name: workflow for workflow in (
    create.CREATE, delete.DELETE, power.START, power.STOP, power.REBOOT_SOFT, power.REBOOT_HARD)}
