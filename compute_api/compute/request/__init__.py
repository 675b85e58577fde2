# SPDX-License-Identifier: Apache-2.0
"""The request object of handlers, and services that handlers share."""
