# SPDX-License-Identifier: Apache-2.0
"""Parts of steps that several workflows use, one module per subject."""
