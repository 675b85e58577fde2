# SPDX-License-Identifier: Apache-2.0
"""Actions on servers, and the preparation of their arguments."""
