# SPDX-License-Identifier: Apache-2.0
"""The state and the services that a handler gets with each request."""
