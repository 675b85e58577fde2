# SPDX-License-Identifier: Apache-2.0
"""The functions that the API calls for each action of POST /servers/{id}/action.

``states.ACTIONS`` has one or more rows for each action. A row's ``workflow`` is a workflow of
``conductor.workflows``, and its ``immediate`` a function of ``store.servers.immediate_actions``.
"""

from __future__ import annotations

from compute_api.compute.servers import consoles
from compute_api.compute.servers.actions import moves as server_moves
from compute_api.compute.servers.actions import preparers as server_preparers
from compute_api.compute.servers.actions import rebuild as server_rebuild
from compute_api.compute.servers.consoles import Query
from compute_api.compute.servers.networks import addresses, interfaces, security_groups
from compute_api.compute.servers.prepared_action import Prepare

#: Key of the body -> function that prepares the action. Other actions have no arguments.
PREPARERS: dict[str, Prepare] = {
    "rescue": server_preparers.rescue,
    "changePassword": server_preparers.change_password,
    "createImage": server_preparers.create_image,
    "createBackup": server_preparers.create_backup,
    "lock": server_preparers.lock,
    "unlock": server_preparers.unlock,
    "os-resetState": server_preparers.reset_state,
    "shelve": server_preparers.shelve,
    "unshelve": server_preparers.unshelve,
    "rebuild": server_rebuild.prepare,
    "resize": server_moves.resize,
    "confirmResize": server_moves.confirm,
    "revertResize": server_moves.revert,
    "migrate": server_moves.migrate,
    "os-migrateLive": server_moves.migrate_live,
    "evacuate": server_moves.evacuate,
    "addSecurityGroup": security_groups.add,
    "removeSecurityGroup": security_groups.remove,
}

#: ``query`` of a row -> function that carries out the action and returns the response body or None.
QUERIES: dict[str, Query] = {
    "console_output": consoles.console_output,
    "vnc_console": consoles.by_action("os-getVNCConsole", "vnc"),
    "spice_console": consoles.by_action("os-getSPICEConsole", "spice"),
    "serial_console": consoles.by_action("os-getSerialConsole", "serial"),
    "network_info": interfaces.network_info,
    "add_floating_ip": addresses.add_floating,
    "remove_floating_ip": addresses.remove_floating,
    "add_fixed_ip": addresses.add_fixed,
    "remove_fixed_ip": addresses.remove_fixed,
}
