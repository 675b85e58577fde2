# SPDX-License-Identifier: Apache-2.0
"""A small Cinder v3: volumes as sparse raw files in a folder, snapshots, types, attachments.

`app.py` lists the routes; `python -m deploy.one_machine.services.volume serve` runs it. What must
stay true: a volume's row says what may happen to its file; a file with its own name is whole; work
that takes long stands in the table of jobs until it is done, so that a death of the process costs
nothing.
"""
