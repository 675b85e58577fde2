# SPDX-License-Identifier: Apache-2.0
"""Where Kilonova and Nova's schemas do not agree, and why. What is no longer true here fails a test.

docs/differences.md has for readers what of it is on purpose.
"""
from __future__ import annotations

#: (operation, place in the answer): why it is not as the schema has it.
ANSWERS: dict[tuple[str, str], str] = {
    ("POST /os-server-external-events", "status"):
        "207 when not every event was taken: so does Nova's code, past its declaration",
    ("POST /servers/{id}/action addFloatingIp", "status"): "202: so does Nova's code, past its declaration",
    ("POST /servers/{id}/action removeFloatingIp", "status"): "202: so does Nova's code, past its declaration",
    ("PUT /servers/{server_id}/tags/{id}", "status"): "201 for a tag that is new: so does Nova's code, undeclared",
    ("POST /servers/{server_id}/os-interface", "status"):
        "202 without a body when the guest has not got the interface in the time that the API waits; Nova waits longer",
    ("GET /os-console-auth-tokens/{id}", "console/internal_access_path"):
        "the secret that opens the host's relay; the schema only knows a path that is a UUID, of one hypervisor",
    ("GET /os-instance_usage_audit_log", "instance_usage_audit_logs/hosts_not_run/*"):
        "names of hosts, as Nova's code gives them; the schema takes them for UUIDs",
    ("GET /os-instance_usage_audit_log/{id}", "instance_usage_audit_log/hosts_not_run/*"):
        "names of hosts, as Nova's code gives them; the schema takes them for UUIDs",
    ("GET /os-server-groups/{id}", "server_group/policies/*"):
        "a group with a policy of a later version is shown as it is, as Nova's code does",
    ("GET /os-server-groups", "server_groups/*/policies/*"):
        "a group with a policy of a later version is shown as it is, as Nova's code does",
}
