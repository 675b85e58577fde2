# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site, and its generated tables."""
