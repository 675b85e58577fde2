# SPDX-License-Identifier: Apache-2.0
"""One cloud: its facts, files, certificates, broker and processes."""
