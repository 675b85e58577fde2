# SPDX-License-Identifier: Apache-2.0
"""The embedded services for one machine: identity, image, network and volume.

They implement parts of Keystone v3, Glance v2, Neutron v2.0 and Cinder v3.
Kilonova and the clients reach them over HTTP only, as they would reach the real services. Each
service has a separate SQLite file. docs/one-machine.md lists the routes with their consumers.

The services share a small framework: `resource.py` (list, create, show, change, delete),
`listing.py` (queries, sorting, pages), `schemas.py` (bodies), `faults.py` (refusals), `quotas.py`
(limits), `guard.py` (authentication and callers), `external.py` (requests to other services),
`database.py` and `web.py`. `json_types.py` names the types of JSON.

The services import only the HTTP server and helpers of the product. The product does not import the
services. Import contracts in setup.cfg enforce both.
"""
