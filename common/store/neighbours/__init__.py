# SPDX-License-Identifier: Apache-2.0
"""What neighbouring services have still to do for us."""
