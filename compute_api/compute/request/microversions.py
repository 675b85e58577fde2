# SPDX-License-Identifier: Apache-2.0
"""The microversions: their history, the supported range, and the choice of a request.

Other modules represent version 2.N as the number N. The effect of a version is in the route, field
or schema that changes, as ``since`` and ``until``. This module only lists the versions, for readers
and for the supported range.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.domain import errors
from compute_api.http.microversions import find_version, is_version, number, parse

HISTORY: tuple[tuple[str, str], ...] = (
    ("2.1", "strict validation: unknown keys are refused"),
    ("2.2", "key pair type; 201 and 204 for key pairs"),
    ("2.3", "more server attributes for admins; delete_on_termination of attached volumes"),
    ("2.4", "os-fixed-ips reserved (that API is gone)"),
    ("2.5", "everybody may filter servers by ip6"),
    ("2.6", "remote-consoles replaces the os-get*Console actions"),
    ("2.7", "access to a public flavor cannot be given: 409"),
    ("2.8", "console protocol mks"),
    ("2.9", "server locked"),
    ("2.10", "key pairs of other users, for admins"),
    ("2.11", "service forced_down"),
    ("2.12", "os-virtual-interfaces net_id (that API is gone)"),
    ("2.13", "server group project_id and user_id"),
    ("2.14", "evacuate without onSharedStorage and without a password in the answer"),
    ("2.15", "server group policies soft-affinity and soft-anti-affinity"),
    ("2.16", "server host_status"),
    ("2.17", "trigger_crash_dump"),
    ("2.18", "the project id in the URL is optional"),
    ("2.19", "server description"),
    ("2.20", "volumes of shelved servers"),
    ("2.21", "instance actions of deleted servers"),
    ("2.22", "force_complete of a live migration"),
    ("2.23", "migrations of a server; more about migrations"),
    ("2.24", "abort of a live migration"),
    ("2.25", "os-migrateLive block_migration auto"),
    ("2.26", "server tags"),
    ("2.27", "header OpenStack-API-Version"),
    ("2.28", "hypervisor cpu_info is an object"),
    ("2.29", "evacuate force"),
    ("2.30", "os-migrateLive force"),
    ("2.31", "os-console-auth-tokens for every console"),
    ("2.32", "device tags at create"),
    ("2.33", "pages of hypervisors; block device tags are refused until 2.41"),
    ("2.34", "os-migrateLive checks in the background"),
    ("2.35", "pages of key pairs"),
    ("2.36", "proxies to other services end; network quotas leave limits and quota sets"),
    (
        "2.37",
        "networks is required at create and may be auto or none; network tags are refused until 2.41",
    ),
    ("2.38", "an unknown status filter is refused"),
    ("2.39", "the image metadata proxy and its limit end"),
    ("2.40", "pages of os-simple-tenant-usage"),
    ("2.41", "aggregate uuid"),
    ("2.42", "device tags at create work again"),
    ("2.43", "os-hosts ends"),
    ("2.44", "actions on fixed and floating addresses end"),
    ("2.45", "createImage answers the image's id"),
    ("2.46", "header X-OpenStack-Request-ID"),
    ("2.47", "server flavor is embedded"),
    ("2.48", "standard diagnostics"),
    ("2.49", "tags when attaching"),
    ("2.50", "server groups in quota class sets, network quotas out"),
    ("2.51", "events of instance actions for everybody"),
    ("2.52", "tags at create"),
    ("2.53", "services and hypervisors are known by uuid"),
    ("2.54", "rebuild key_name"),
    ("2.55", "flavor description"),
    ("2.56", "migrate host"),
    ("2.57", "personality ends, and its limits"),
    ("2.58", "pages of instance actions, updated_at"),
    ("2.59", "pages of migrations"),
    ("2.60", "volumes attached to several servers"),
    ("2.61", "extra_specs in flavors"),
    ("2.62", "host and hostId of instance action events"),
    ("2.63", "trusted_image_certificates"),
    ("2.64", "server group policy and rules"),
    ("2.65", "abort of queued live migrations"),
    ("2.66", "changes-before"),
    ("2.67", "block device volume_type"),
    ("2.68", "force ends in live migration and evacuate"),
    ("2.69", "partial records when parts of the cloud cannot be reached"),
    ("2.70", "tags of attachments shown"),
    ("2.71", "server server_groups"),
    ("2.72", "ports with resource requests at create"),
    ("2.73", "locked_reason; filter and sort by locked"),
    ("2.74", "host and hypervisor_hostname at create"),
    ("2.75", "unknown query parameters are refused; full answers to update and rebuild"),
    ("2.76", "external event power-update"),
    ("2.77", "unshelve availability_zone"),
    ("2.78", "server topology"),
    ("2.79", "delete_on_termination when attaching a volume"),
    ("2.80", "migrations by user and project"),
    ("2.81", "image caching on aggregates"),
    ("2.82", "external event accelerator-request-bound"),
    ("2.83", "more server filters for everybody"),
    ("2.84", "details of failed instance action events"),
    ("2.85", "delete_on_termination of an attached volume can change"),
    ("2.86", "flavor extra specs are validated"),
    ("2.87", "rescue of servers on volumes"),
    ("2.88", "hypervisor usage ends, uptime joins"),
    ("2.89", "attachment_id and bdm_uuid of volume attachments"),
    ("2.90", "hostname can be chosen and everybody sees it"),
    ("2.91", "unshelve host"),
    ("2.92", "key pairs are imported only"),
    ("2.93", "rebuild of servers on volumes"),
    ("2.94", "hostname may be an FQDN"),
    ("2.95", "evacuated servers stay stopped"),
    ("2.96", "pinned_availability_zone"),
    ("2.97", "shares of servers"),
    ("2.98", "image properties in servers"),
    ("2.99", "spice-direct consoles"),
    ("2.100", "server scheduler_hints"),
    ("2.101", "attaching a volume answers at once"),
    ("2.102", "flavor name filter; unknown query parameters are refused everywhere"),
    ("2.103", "os-volumes_boot ends"),
    ("2.104", "pinned_availability_zone can be given up"),
)

#: Nova's header for the microversion before 2.27.
OLDER_HEADER = "X-OpenStack-Nova-API-Version"
#: The namespace of operations that Nova does not have, and the only version of this namespace.
EXTENSION, EXTENSION_VERSION = "kilonova", "1.0"
MIN, MAX = number(HISTORY[0][0]), number(HISTORY[-1][0])


def text(version: int) -> str:
    """Return the text of a version, for example "2.53" for 53."""
    return f"2.{version}"


def unsupported(version: int) -> errors.NotFound:
    """Return the error for an operation that does not exist at this version."""
    return errors.NotFound(f"API version '{text(version)}' is not supported on this method.")


def chosen(headers: Mapping[str, str]) -> int:
    """Return the minor number of the version that the headers choose.

    Without such a header this is the lowest version. The text "latest" chooses the highest version.

    Raises:
        BadRequest: The header does not have the form of a version.
        NotAcceptable: The version is not supported.
    """
    header = find_version(headers, "compute", OLDER_HEADER)
    if header is None:
        return MIN
    if header == "latest":
        return MAX
    if not is_version(header) or header.startswith("0"):
        raise errors.BadRequest(
            f"API Version String {header[:40]} is of invalid format. Must be of format "
            "MajorNum.MinorNum."
        )
    major, minor = parse(header) or (0, 0)
    if major != 2 or not MIN <= minor <= MAX:
        raise errors.NotAcceptable(
            f"Version {header[:40]} is not supported by the API. Minimum is {text(MIN)} and "
            f"maximum is {text(MAX)}."
        )
    return minor


def check_extension(headers: Mapping[str, str]) -> None:
    """Check the version that the headers choose for operations that Nova does not have.

    A missing header and "latest" are valid, because there is only one version.

    Raises:
        NotAcceptable: The headers choose an unsupported version.
    """
    header = find_version(headers, EXTENSION)
    if header not in (None, "latest", EXTENSION_VERSION):
        raise errors.NotAcceptable(
            f"Version {str(header)[:40]} of {EXTENSION} is not supported by the API. Minimum "
            f"and maximum are {EXTENSION_VERSION}."
        )
