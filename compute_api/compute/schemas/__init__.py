# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas of bodies and queries, with changes by microversion: one module per resource."""
