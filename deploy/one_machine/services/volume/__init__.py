# SPDX-License-Identifier: Apache-2.0
"""A small Cinder v3 with volumes as sparse raw files in a folder, snapshots, types and attachments.

`app.py` lists the routes. `python -m deploy.one_machine.services.volume serve` runs the service.
Invariant: a volume's row determines the operations on its file. A file with its final name is
complete. Long work is in the table of jobs until it is done, so a crash loses nothing.
"""
