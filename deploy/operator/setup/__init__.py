# SPDX-License-Identifier: Apache-2.0
"""``kilonova setup``: install controllers, and prepare hosts for live migration."""
