# SPDX-License-Identifier: Apache-2.0
"""A small Neutron v2.0: networks, ports, security groups, routers, and for each host what it must
wire.

`app.py` lists the routes; `python -m deploy.one_machine.services.network serve` runs it, `host/`
is its part on every host. What must stay true: a request is one transaction; what hosts and the
compute service get follows from committed rows.
"""
