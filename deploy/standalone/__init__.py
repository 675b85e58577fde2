# SPDX-License-Identifier: Apache-2.0
"""The small neighbours for one box: an identity (Keystone v3) and an image (Glance v2) service.

Kilonova and the clients reach them only over HTTP, exactly as they would reach the real services; each keeps
its own SQLite file. Nothing here imports from `common/`, and nothing outside imports from here.
"""
