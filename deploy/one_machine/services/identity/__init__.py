# SPDX-License-Identifier: Apache-2.0
"""A small Keystone v3: domains, projects, users, roles, tokens and the catalogue.

`app.py` lists the routes; `python -m deploy.one_machine.services.identity` bootstraps and serves.
What must stay true: what a token is worth is read from the rows of this moment, so that disabling
a user or taking a role away needs no revocation.
"""
