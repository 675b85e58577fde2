# SPDX-License-Identifier: Apache-2.0
"""A small Keystone v3 with domains, projects, users, roles, tokens and the catalogue.

`app.py` lists the routes. `python -m deploy.one_machine.services.identity` bootstraps and serves.
Invariant: the rights of a token are read from the present rows, so disabling a user or removing a
role needs no revocation.
"""
