# SPDX-License-Identifier: Apache-2.0
"""All kinds of findings, each with invariant, cause and remedy.

Pure data. ``kilonova doctor`` prints cause and remedy of a finding, ``remedies`` implements the
remedies, and docs/doctor.md is generated from the table (``.venv/bin/python -m
deploy.site.doctor_page``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Mender(StrEnum):
    """How ``kilonova doctor --fix`` repairs a kind."""

    #: One transaction checks again and writes.
    ROWS = "rows"
    #: The host removes the guest, by a command that is repeated until success.
    REMOVAL = "removal"
    #: A pending cleanup, which conductors retry until success.
    CLEANUP = "cleanup"
    #: An ordinary action, with journal and undo.
    ACTION = "action"
    #: The guest is adopted or discarded, after a query to all hosts.
    GUEST = "guest"
    #: Only an operator can decide.
    OPERATOR = "operator"


@dataclass(frozen=True)
class Defect:
    """A kind of finding."""

    name: str
    #: As in ``Finding.invariant``.
    invariant: str
    detects: str
    cause: str
    remedy: str
    way: Mender = Mender.ROWS
    #: True if the repair requires that no action has the server.
    is_free: bool = True
    #: Findings of these kinds about the same server must be repaired first.
    first: tuple[str, ...] = ()


_BY_HAND = "rows were changed by hand, or only some tables were restored"
_LOST = "a fail-over or a restore lost the last commits"
_CLOCK = "the database's clock was ahead at the time of the write"
_AFTER = "an action ended after its pivot without completion"
_CUT = (
    "the host's configuration was reduced while guests had the hardware, or two guests got the same"
)

_ANEW = "openstack server remove volume, then openstack server add volume"

# fmt: off
_ALL = (
    # --- servers and their actions ---
    Defect("task-state", "task-state", "a task_state without an action", _AFTER + ", or " + _BY_HAND,
         "the task_state is cleared"),
    Defect("building-idle", "server-state", "a server that is BUILDING without an action", _LOST,
         "the server goes to ERROR with a message, and the user rebuilds or deletes it"),
    Defect("nowhere", "server-state", "a server without a host in a state that needs one", _AFTER,
         "the server gets the host of the guest record, or without a record goes to SHELVED_OFFLOADED or ERROR"),
    Defect("shelved-without-image", "server-state", "an offloaded server without image or guest",
         "the image was deleted after the host had removed the guest",
         "the server goes to ERROR with a message, and the user deletes it"),
    Defect("resting-since", "server-state", "a server that is SHELVED or SOFT_DELETED without a time",
         _BY_HAND, "the time is set to now"),
    Defect("lock", "server-lock", "a lock without an owner, or the owner of a missing lock", _BY_HAND,
         "the server is unlocked", is_free=False),
    Defect("held-by-ended", "held-by-action", "a server that is held by an action that has ended or does not exist",
         _BY_HAND, "the server is released", is_free=False),
    Defect("fence-of-action", "held-by-action", "a server and an action with different fences", _LOST,
         "both get a higher fence, and commands under way are sent again", is_free=False),
    Defect("holds-nothing", "held-by-action", "a running action that does not hold the server", _BY_HAND,
         "the action ends as superseded", is_free=False),
    Defect("due", "due", "an action that is due without a time", _BY_HAND, "the due time is set to now", is_free=False),
    Defect("never-sent", "due", "an action that waits for a command that was never sent", _BY_HAND,
         "the step starts again", is_free=False),
    Defect("lease-of-action", "due", "a conductor's lease of an action that ends more than an hour from now", _CLOCK,
         "the lease ends", is_free=False),
    Defect("stuck", "stuck", "an action that failed repeatedly for an unexpected reason",
         "see kilonova action show", "the action continues at its step (repair the cause first)",
         Mender.ACTION, is_free=False),
    Defect("overdue", "overdue", "a due action that no conductor takes",
         "no conductor of the right release runs", "the action ends as failed, and the server goes to ERROR",
         Mender.ACTION, is_free=False),
    # --- guests ---
    Defect("one-guest", "one-guest", "two guests of a server that may run", _BY_HAND,
         "the guest that is not on the server's host is removed", Mender.REMOVAL),
    Defect("guest-of-gone-server", "guest-of-server", "a guest of a deleted server", _BY_HAND,
         "the host removes the guest", Mender.REMOVAL, is_free=False),
    Defect("guest-elsewhere", "guest-of-server",
         "a guest on a host that is not the server's, for example of a SHELVED_OFFLOADED server",
         _AFTER, "the server gets the guest's host. If the server has another guest, or is shelved and "
         "this guest is off, the host removes this guest", Mender.REMOVAL),
    Defect("no-guest-record", "guest-of-server", "a server on a host without a guest's record", _BY_HAND,
         "the record and the allocation are created"),
    Defect("guest-of-no-move", "guest-of-move", "a guest that is kept or arriving without an open migration",
         "a migration ended while an operator stopped the action", "the host removes the guest", Mender.REMOVAL),
    Defect("kept-may-run", "guest-of-move", "a guest that is kept or arriving and may run", _BY_HAND,
         "the guest may not run any more"),
    Defect("held-by-no-migration", "guest-of-move", "resources held by a migration that does not start on that host",
         _BY_HAND, "the server gets the resources"),
    Defect("one-move", "one-move", "several open migrations of a server", _BY_HAND, "all but the newest end"),
    Defect("move-without-action", "move-of-server", "an open migration of an idle or deleted server", _AFTER,
         "the migration ends, the server keeps the host, and guests elsewhere are removed", Mender.REMOVAL),
    Defect("resized-without-move", "move-of-server", "a server in VERIFY_RESIZE without a migration",
         _BY_HAND, "the server goes to ACTIVE or STOPPED, according to the guest record"),
    Defect("removal-sent", "removal", "a guest to be removed, with a command sent in the future", _CLOCK,
         "the command is sent again", Mender.REMOVAL, is_free=False),
    Defect("domain-known", "domain-known", "a guest without a record", _LOST,
         "the guest is adopted, or discarded if the server was deleted or has a guest on another host", Mender.GUEST),
    Defect("two-domains", "two-domains", "a server that runs on two hosts", _LOST,
         "the guest without a record is discarded. A guest with a record is stopped automatically",
         Mender.GUEST),
    Defect("guest-there", "guest-there", "a server without a guest on the server's host",
         "the guest was removed by hand on the host, or the disk is lost",
         "a hard reboot. If that cannot start a guest, the server goes to ERROR, and the user rebuilds it",
         Mender.ACTION, first=("domain-known", "no-guest-record")),
    # --- counts and amounts ---
    Defect("counted", "counted", "a quota that counts another size than the server has", _BY_HAND,
         "the quota counts the flavor"),
    Defect("shares", "shares", "a server that counts the wrong number of shares", _BY_HAND,
         "they are counted again"),
    Defect("shares-of-gone", "shares", "shares of a deleted server", _BY_HAND,
         "the shared file system service removes the rules", Mender.CLEANUP, is_free=False),
    Defect("share-in-transit", "share-in-transit", "a share that is being attached or detached without an action",
         _AFTER, "the share goes to error, and the user detaches it"),
    Defect("volumes", "volumes", "a server that counts the wrong number of volumes", _BY_HAND,
         "they are counted again"),
    Defect("volumes-of-gone", "volumes", "volumes of a deleted server", _BY_HAND,
         "the block storage service ends their attachments", Mender.CLEANUP, is_free=False),
    Defect("volume-in-error", "volume-of-server",
         "a volume that could not be attached, and may still be connected to the guest",
         "the host failed during the undo",
         "the host detaches the volume, and the server loses it", Mender.CLEANUP),
    Defect("volume-elsewhere", "volume-of-server", "a volume that is not connected to the server's host", _BY_HAND,
         "the block storage service connects the volume to the host if the server is off, else to no host. The guest "
         "gets the volume at the next start", Mender.CLEANUP),
    Defect("allocation-of-nothing", "allocation-of-guest", "an allocation on a host without a guest", _BY_HAND,
         "the allocation is released"),
    Defect("guest-without-allocation", "allocation-of-guest", "a guest without an allocation", _BY_HAND,
         "the allocation of flavor and image is made, even without room"),
    Defect("allocation-exact", "allocation-exact", "an allocation that differs from flavor and image", _BY_HAND,
         "the allocation is corrected"),
    Defect("allocation-of-way-back", "allocation-exact", "a resize that keeps too much or too little for a revert",
         _BY_HAND, "openstack server resize confirm or revert", Mender.OPERATOR),
    Defect("flavor-refused", "allocation-exact", "a server with a flavor or image that is refused now",
         "extra specs or properties that an older release accepted", "resize or rebuild the server", Mender.OPERATOR),
    Defect("consumer-of-nothing", "consumer", "a consumer without an allocation", _BY_HAND, "the consumer is removed"),
    Defect("no-consumer", "consumer", "allocations without a consumer", _BY_HAND, "the consumer is created",
         is_free=False),
    Defect("capacity", "capacity", "a host with allocations above the capacity", _BY_HAND,
         "move servers away, or restore the host's capacity", Mender.OPERATOR),
    Defect("assignment-not-asked-for", "assignment-exact",
         "a guest with assigned hardware that the flavor does not request",
         _BY_HAND, "the record of the assignment is removed"),
    Defect("assignment-exact", "assignment-exact",
         "CPUs, pages or devices that are not assigned, assigned twice, or missing on the host",
         _CUT, "restore the host's configuration, or migrate the server", Mender.OPERATOR),
    Defect("group-policy", "group-policy", "servers of a group on hosts that the policy forbids", _BY_HAND,
         "migrate one of them to an allowed host", Mender.OPERATOR),
    Defect("group-member", "group-member", "members of a deleted server group", _BY_HAND, "the members are removed",
         is_free=False),
    # --- hosts ---
    Defect("disabled-trait", "disabled-trait", "a provider whose trait differs from the state of the host's service",
         _BY_HAND,
         "the trait is set to the state of the service"),
    Defect("aggregate-host", "aggregate-host", "a member of a deleted aggregate, or a deleted host in an aggregate",
         _BY_HAND, "the membership is removed"),
    Defect("one-zone", "one-zone", "a host in two zones", _BY_HAND,
         "openstack aggregate remove host, for all aggregates but those of one zone", Mender.OPERATOR),
    Defect("document", "document", "a document that cannot be read: hosts of a damaged aggregate take no new "
         "servers, and a host with a damaged record of CPUs or devices assigns no CPUs or devices", _BY_HAND,
         "write the document by hand, or from a backup. Of an aggregate: remove the hosts and recreate it",
         Mender.OPERATOR),
    Defect("host-without-service", "host-known", "a host without a service, or without a heartbeat", _BY_HAND,
         "they are created, as at a registration"),
    Defect("host-without-provider", "host-known", "a host without provider or inventory", _BY_HAND,
         "the host registers again and reports an inventory"),
    Defect("provider-without-host", "host-known", "the provider of a deleted host", _BY_HAND,
         "the provider is removed"),
    Defect("host-without-key", "host-known", "a host without a key. Conductors refuse the messages",
         "kilonova host remove was interrupted",
         "kilonova host remove HOST completes the removal. kilonova host add HOST lets the host join again",
         Mender.OPERATOR),
    Defect("certificate-lasts", "certificate-lasts", "a host's certificate that expires soon",
         "the agent cannot renew the certificate: no conductor answers, or the authority's key is missing",
         "see journalctl -u kilonova-agent on the host for the reason", Mender.OPERATOR),
    Defect("heartbeat", "heartbeat", "a heartbeat more than an hour in the future", _CLOCK,
         "the time is set to now"),
    Defect("host-action-lease", "due", "a lease of a host action that ends more than an hour from now", _CLOCK,
         "the lease ends"),
    # --- neighbours ---
    Defect("cleanup", "due", "a pending cleanup that is due more than a day from now", _CLOCK, "it becomes due now",
         Mender.CLEANUP, is_free=False),
    Defect("duty", "due", "a duty (to send notifications) that is leased for more than an hour", _CLOCK,
         "the lease ends, and a running process takes the duty"),
    Defect("notifications-sent", "notifications-sent", "notifications that wait for long",
         "the broker accepts no notification, or no conductor sends notifications",
         "start the broker, or correct [oslo_messaging_notifications] transport_url", Mender.OPERATOR),
    Defect("port-of-nobody", "port-of-server", "a port of a deleted server", _LOST,
         "the network service deletes the port", Mender.CLEANUP, first=("domain-known",)),
    Defect("port-unplugged", "port-of-server", "a port that the server does not have", _LOST,
         "attach the port, or delete it", Mender.OPERATOR),
    Defect("port-elsewhere", "port-of-server", "a port that is bound to no host, or to a host without the server",
         _AFTER, "the network service binds the port to the server's host", Mender.CLEANUP),
    Defect("port-twice", "port-of-server", "a port that is also bound to another host", _AFTER,
         "the network service ends that binding", Mender.CLEANUP),
    Defect("interface-of-server", "interface-of-server", "an interface of a deleted port",
         "the port was deleted at the network service", "the interface is detached", Mender.ACTION),
    Defect("volume-without-attachment", "volume-of-server",
         "a volume of a server without an attachment: other servers may "
         "get it", "the attachment was deleted in the block storage service", _ANEW, Mender.OPERATOR),
    Defect("attachment-incomplete", "volume-of-server", "an attachment that was not completed", _LOST,
         "the block storage service completes the attachment", Mender.CLEANUP),
    Defect("attachment-of-server", "attachment-of-server", "an attachment that the server, which may be deleted, does "
         "not have", _LOST, "the block storage service deletes the attachment when no host has the volume connected",
         Mender.CLEANUP),
    Defect("volume-of-another", "volume-of-guest", "a guest with a volume that the server does not have",
         "the volume was detached while the host was declared dead and the guest still ran",
         "the server is rebooted, and starts without the volume", Mender.ACTION),
    Defect("volume-not-in-guest", "volume-of-guest", "a guest without a volume of the server",
         "the volume was detached by hand on the host, or " + _LOST,
         "the server is rebooted, and starts with the volume", Mender.ACTION),
    Defect("files-elsewhere", "files-known", "files without a guest on a host, of a server that was deleted or has "
         "a guest on another host", "the host was lost and removed before it had deleted the files, or " + _LOST,
         "the host deletes them", Mender.REMOVAL, first=("guest-there",)),
    Defect("files-of-nobody", "files-known", "files without a guest on a host, of a server without a record",
         _LOST, "check the files, because they may be the only copy. kilonova host discard HOST SERVER deletes them",
         Mender.OPERATOR),
    Defect("share-rule-of-nobody", "share-rule-of-server", "a rule that lets a host mount a share that no server there "
         "has", "a call timed out and succeeded later, or " + _LOST,
         "the shared file system service removes the rule", Mender.CLEANUP),
    Defect("image-in-transit", "image-in-transit", "a snapshot that is queued or saving without an action",
         _AFTER, "the image service deletes the snapshot", Mender.CLEANUP),
    Defect("service-registered", "service-registered", "a required service that the catalogue does not name",
         "it was never registered, or only in another region", "register it, or set the endpoint", Mender.OPERATOR),
)
# fmt: on

KINDS = {one.name: one for one in _ALL}
