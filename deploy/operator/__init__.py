# SPDX-License-Identifier: Apache-2.0
"""The operator's command ``kilonova``: one module for each noun, imported when it is called."""
