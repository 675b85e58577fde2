# SPDX-License-Identifier: Apache-2.0
"""The handlers: one module for each resource, functions of (request, …) that return a body."""
