# SPDX-License-Identifier: Apache-2.0
"""The gunicorn worker: connections, buffers and limits of clients."""
