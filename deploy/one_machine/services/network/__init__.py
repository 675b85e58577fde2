# SPDX-License-Identifier: Apache-2.0
"""A small Neutron v2.0: networks, ports, security groups, routers, and an agent on each host.

`app.py` lists the routes. `python -m deploy.one_machine.services.network serve` runs the service,
and `host/` is its network agent for the hosts. Invariant: a request is one transaction. The data
for hosts and the events for the compute service follow from committed rows.
"""
