# SPDX-License-Identifier: Apache-2.0
"""A small Glance v2 with images, their data on disk, and schemas.

`app.py` lists the routes. `python -m deploy.one_machine.services.image serve` runs the service.
Invariant: an image is active only when its whole file is on disk, with a checksum. Only admins see
images that are not visible to their project.
"""
