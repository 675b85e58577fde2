# SPDX-License-Identifier: Apache-2.0
"""POST /servers, in the order of its phases: body, look-up, checks, rows, commit."""
