# SPDX-License-Identifier: Apache-2.0
"""A small Glance v2: images with their data on disk, members, schemas.

`app.py` lists the routes; `python -m deploy.one_machine.services.image serve` runs it. What must
stay true: an image is active only when its whole file, synced and checksummed, is in place; nobody
sees an image that isn't shown to their project.
"""
