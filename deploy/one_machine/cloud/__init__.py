# SPDX-License-Identifier: Apache-2.0
"""One cloud on this machine: the facts, files, certificates, broker and processes."""
