# SPDX-License-Identifier: Apache-2.0
"""Views of the deprecated resources of other services."""
