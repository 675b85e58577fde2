# SPDX-License-Identifier: Apache-2.0
"""The stand-ins for one machine: identity (Keystone v3), image (Glance v2), network (Neutron v2.0)
and volume (Cinder v3) services.

Kilonova and the clients reach them only over HTTP, as they would reach the real services; each
keeps its own SQLite file. Their core: `resource.py` (list, create, show, change, delete),
`schemas.py` (bodies), `listing.py` (queries and pages), `database.py`, `web.py` and `guard.py`;
`json_types.py` names the types of JSON.
They use the product's HTTP edge and nothing else of it; nothing of it uses them. Contracts of
imports in setup.cfg hold both.
"""
