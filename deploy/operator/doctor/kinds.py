# SPDX-License-Identifier: Apache-2.0
"""All kinds of findings, each with invariant, cause and remedy.

Pure data. ``kilonova doctor`` prints the table, ``remedies`` implements the remedies, and
docs/doctor.md is generated from it (``.venv/bin/python -m deploy.site.doctor_page``).
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
    #: Findings of these kinds about the same server must be repaired before.
    first: tuple[str, ...] = ()


_BY_HAND = "rows were changed by hand, or a restore brought back some tables and not others"
_LOST = "a fail-over or a restore has lost the last commits"
_CLOCK = "the database's clock was ahead when it was written"
_AFTER = "an action ended after its point of no return, where it could not be finished"
_CUT = "the host's configuration was cut under its guests, or two guests were given the same"

_ANEW = "openstack server remove volume, then openstack server add volume"

# fmt: off
_ALL = (
    # --- servers and their actions ---
    Defect("task-state", "task-state", "a task_state that no action has", _AFTER + "; or " + _BY_HAND,
         "the task_state is cleared"),
    Defect("building-idle", "server-state", "a server that is BUILDING and no action builds it", _LOST,
         "the server goes to ERROR, and says so: its user rebuilds or deletes it"),
    Defect("nowhere", "server-state", "a server that has a guest by its state, and no host", _AFTER,
         "it gets the place of its guest's record; without one it goes to ERROR, or rests in its image"),
    Defect("shelved-without-image", "server-state", "a server that was offloaded, without image or guest",
         "its image was removed, and its host has removed the guest",
         "the server goes to ERROR, and says so: its user deletes it"),
    Defect("resting-since", "server-state", "a server that is SHELVED or SOFT_DELETED since nobody knows when",
         _BY_HAND, "its time begins now"),
    Defect("lock", "server-lock", "a lock that nobody holds, or an owner of a lock that is not there", _BY_HAND,
         "the server is unlocked", is_free=False),
    Defect("held-by-ended", "held-by-action", "a server that is held by an action which has ended, or is gone",
         _BY_HAND, "the server is let go", is_free=False),
    Defect("fence-of-action", "held-by-action", "a server and its action with different fences", _LOST,
         "both get a fence above either, so that whatever is under way is sent again", is_free=False),
    Defect("holds-nothing", "held-by-action", "an action in hand that does not hold its server", _BY_HAND,
         "the action ends as superseded", is_free=False),
    Defect("due", "due", "an action that is due, at no time", _BY_HAND, "it is due now", is_free=False),
    Defect("never-sent", "due", "an action that waits for a command which was sent nowhere, or never", _BY_HAND,
         "its step is begun again", is_free=False),
    Defect("lease-of-action", "due", "a conductor's lease of an action that ends an hour from now, or later", _CLOCK,
         "the lease ends", is_free=False),
    Defect("stuck", "stuck", "an action that failed again and again where nobody foresaw it",
         "kilonova action show says it", "it is tried again where it stands: mend the cause first",
         Mender.ACTION, is_free=False),
    Defect("overdue", "overdue", "an action that is due and that no conductor takes",
         "its release runs nowhere any more", "it ends as failed, and the server goes to ERROR",
         Mender.ACTION, is_free=False),
    # --- guests ---
    Defect("one-guest", "one-guest", "two guests of a server that may run", _BY_HAND,
         "the one where the server is not is removed", Mender.REMOVAL),
    Defect("guest-of-gone-server", "guest-of-server", "a guest of a server that is gone", _BY_HAND,
         "its host removes it", Mender.REMOVAL, is_free=False),
    Defect("guest-elsewhere", "guest-of-server", "a guest where its server is not, as of one that is SHELVED_OFFLOADED",
         _AFTER, "the server gets its guest's place; where it has another guest, or rests in its image while "
         "this one is off, the host removes this one", Mender.REMOVAL),
    Defect("no-guest-record", "guest-of-server", "a server on a host without a guest's record", _BY_HAND,
         "the record is made, with what the guest holds of the host"),
    Defect("guest-of-no-move", "guest-of-move", "a guest that is kept or arriving, and no migration is open",
         "a migration ended while its action was stopped by hand", "its host removes it", Mender.REMOVAL),
    Defect("kept-may-run", "guest-of-move", "a guest that is kept or arriving, and may run", _BY_HAND,
         "it may not"),
    Defect("held-by-no-migration", "guest-of-move", "resources that a migration holds which is none from there",
         _BY_HAND, "the server holds them"),
    Defect("one-move", "one-move", "several open migrations of a server", _BY_HAND, "the newest stays"),
    Defect("move-without-action", "move-of-server", "an open migration of a server that is idle, or gone", _AFTER,
         "the migration ends: the server is where it is, and what it has elsewhere is removed", Mender.REMOVAL),
    Defect("resized-without-move", "move-of-server", "a server that waits to be confirmed without a migration",
         _BY_HAND, "the server is ACTIVE or STOPPED, as its guest's record says"),
    Defect("debt-sent", "debt", "a guest to be removed, whose command was sent after now", _CLOCK,
         "the command is sent again", Mender.REMOVAL, is_free=False),
    Defect("domain-known", "domain-known", "a guest on a host that no record knows", _LOST,
         "it is adopted; or discarded, where its server was deleted or has its guest on another host", Mender.GUEST),
    Defect("two-domains", "two-domains", "a server that runs on two hosts", _LOST,
         "the guest that no record knows is discarded; hosts are told by themselves to stop one that is known",
         Mender.GUEST),
    Defect("guest-there", "guest-there", "a server whose host has no guest of it",
         "the guest was removed by hand at the host, or its disk is lost",
         "a hard reboot: it starts what is there, else the server goes to ERROR, and its user rebuilds it",
         Mender.ACTION, first=("domain-known", "no-guest-record")),
    # --- counts and amounts ---
    Defect("counted", "counted", "a quota that counts another size than the server has", _BY_HAND,
         "the size of its flavor is counted"),
    Defect("shares", "shares", "a server that counts more or fewer shares than it has", _BY_HAND,
         "they are counted again"),
    Defect("shares-of-gone", "shares", "shares of a server that is gone, whose rules nobody needs", _BY_HAND,
         "the shared file system service removes the rules", Mender.CLEANUP, is_free=False),
    Defect("share-in-transit", "share-in-transit", "a share that is being attached or detached, and no action does it",
         _AFTER, "it is in error, and its user detaches it"),
    Defect("volumes", "volumes", "a server that counts more or fewer volumes than it has", _BY_HAND,
         "they are counted again"),
    Defect("volumes-of-gone", "volumes", "volumes of a server that is gone", _BY_HAND,
         "the block storage service ends their attachments", Mender.CLEANUP, is_free=False),
    Defect("volume-in-error", "volume-of-server", "a volume that may be at a guest, and could not be attached",
         "the host failed on the way back",
         "its host is asked to let go of it, until the server does not have it", Mender.CLEANUP),
    Defect("volume-elsewhere", "volume-of-server", "a volume that is not where its server is", _BY_HAND,
         "the block storage service connects it to the host of a server that is off, or to none; it is in the guest "
         "when that is started", Mender.CLEANUP),
    Defect("allocation-of-nothing", "allocation-of-guest", "an allocation on a host without a guest", _BY_HAND,
         "it is released"),
    Defect("guest-without-allocation", "allocation-of-guest", "a guest without an allocation", _BY_HAND,
         "it holds what its flavor and image need, whether there is room or not"),
    Defect("allocation-exact", "allocation-exact", "an allocation that is not what flavor and image need", _BY_HAND,
         "it is that"),
    Defect("allocation-of-way-back", "allocation-exact", "a resize that keeps too much or too little for its way back",
         _BY_HAND, "openstack server resize confirm or revert", Mender.OPERATOR),
    Defect("flavor-refused", "allocation-exact", "a server whose flavor or image is refused now",
         "extra specs or properties that an older release took", "resize or rebuild the server", Mender.OPERATOR),
    Defect("consumer-of-nothing", "consumer", "a consumer that has no allocation", _BY_HAND, "it is removed"),
    Defect("no-consumer", "consumer", "allocations without a consumer", _BY_HAND, "the consumer is made",
         is_free=False),
    Defect("capacity", "capacity", "a host that gives out more than it has", _BY_HAND,
         "move servers away, or give the host its size back", Mender.OPERATOR),
    Defect("assignment-not-asked-for", "assignment-exact", "a guest that holds parts of its host it does not ask for",
         _BY_HAND, "the record of it is removed"),
    Defect("assignment-exact", "assignment-exact", "CPUs, pages or devices that are missing, held twice, or not there",
         _CUT, "give the host back what it gave out, or migrate the server: it gets others", Mender.OPERATOR),
    Defect("group-policy", "group-policy", "servers of a group where its policy does not let them be", _BY_HAND,
         "migrate one of them: a host is chosen that the policy allows", Mender.OPERATOR),
    Defect("group-member", "group-member", "members of a server group that is gone", _BY_HAND, "they are forgotten",
         is_free=False),
    # --- hosts ---
    Defect("disabled-trait", "disabled-trait", "a provider that does not say whether its host is disabled", _BY_HAND,
         "the trait is set as the service says"),
    Defect("aggregate-host", "aggregate-host", "an aggregate of a host that is gone, or a host of an aggregate",
         _BY_HAND, "the membership is removed"),
    Defect("one-zone", "one-zone", "a host in two zones", _BY_HAND,
         "openstack aggregate remove host, for all aggregates but those of one zone", Mender.OPERATOR),
    Defect("document", "document", "a document that cannot be read: hosts of a damaged aggregate take no new "
         "servers, and a host with a damaged record of CPUs or devices gives none of them out", _BY_HAND,
         "write it anew by hand, or from a backup; of an aggregate: remove its hosts, delete it, and create it anew",
         Mender.OPERATOR),
    Defect("host-without-service", "host-known", "a host without a service, or without a heartbeat", _BY_HAND,
         "they are made, as when a host registers"),
    Defect("host-without-provider", "host-known", "a host that gives nothing out", _BY_HAND,
         "the host registers anew, and tells what it has"),
    Defect("provider-without-host", "host-known", "a host's provider, and the host is gone", _BY_HAND,
         "the provider is removed"),
    Defect("host-without-key", "host-known", "a host without a key, which nobody hears",
         "kilonova host remove was begun",
         "kilonova host remove HOST ends it; kilonova host add HOST lets it join again", Mender.OPERATOR),
    Defect("certificate-lasts", "certificate-lasts", "a host's certificate that ends soon",
         "the agent cannot renew it: no conductor answers it, or its authority's key is away",
         "journalctl -u kilonova-agent on the host says what keeps it from renewing", Mender.OPERATOR),
    Defect("heartbeat", "heartbeat", "a host or service that was seen an hour from now, or later", _CLOCK,
         "it was seen now, and is judged by what comes"),
    Defect("host-action-lease", "due", "a lease of an action on a host that ends an hour from now, or later", _CLOCK,
         "the lease ends"),
    # --- neighbours ---
    Defect("cleanup", "due", "a pending cleanup that is due a day from now, or later", _CLOCK, "it is due now",
         Mender.CLEANUP, is_free=False),
    Defect("duty", "due", "a duty (to send notifications) that is somebody's an hour from now, or later", _CLOCK,
         "it is nobody's: who runs takes it"),
    Defect("notifications-sent", "notifications-sent", "notifications that have waited for long",
         "the broker of notifications takes none, or nobody sends them",
         "start the broker, or correct [oslo_messaging_notifications] transport_url", Mender.OPERATOR),
    Defect("port-of-nobody", "port-of-server", "a port of a server that is gone", _LOST,
         "the network service removes it", Mender.CLEANUP, first=("domain-known",)),
    Defect("port-unplugged", "port-of-server", "a port of a server that does not know it", _LOST,
         "plug it in, or delete it", Mender.OPERATOR),
    Defect("port-elsewhere", "port-of-server", "a port that is bound to no host, or to another than its server's",
         _AFTER, "the network service binds it to the server's host", Mender.CLEANUP),
    Defect("port-twice", "port-of-server", "a port that is bound to one more host", _AFTER,
         "the network service ends that binding", Mender.CLEANUP),
    Defect("interface-of-server", "interface-of-server", "an interface whose port is gone",
         "the port was deleted at the network service", "the interface is detached", Mender.ACTION),
    Defect("volume-without-attachment", "volume-of-server", "a volume of a server without an attachment: others may "
         "get it", "it was ended at the block storage service", _ANEW, Mender.OPERATOR),
    Defect("attachment-incomplete", "volume-of-server", "an attachment that was not completed", _LOST,
         "the block storage service completes it", Mender.CLEANUP),
    Defect("attachment-of-server", "attachment-of-server", "an attachment that its server, which may be gone, does "
         "not know", _LOST, "the block storage service ends it when no host has the volume", Mender.CLEANUP),
    Defect("volume-of-another", "volume-of-guest", "a guest that runs with a volume which its server does not have",
         "it was detached while the host was declared dead, and the guest ran on",
         "the server is rebooted, and starts without it", Mender.ACTION),
    Defect("volume-not-in-guest", "volume-of-guest", "a guest that runs without a volume which its server has",
         "somebody detached it on the host, or " + _LOST,
         "the server is rebooted, and starts with it", Mender.ACTION),
    Defect("files-elsewhere", "files-known", "files without a guest on a host, of a server that was deleted or has "
         "its guest on another host", "its host was lost, and forgotten, before it had removed them; or " + _LOST,
         "its host removes them", Mender.REMOVAL, first=("guest-there",)),
    Defect("files-of-nobody", "files-known", "files without a guest on a host, of a server that no record has anywhere",
         _LOST, "look at them, they may be all that is left of it; kilonova host discard HOST SERVER removes them",
         Mender.OPERATOR),
    Defect("share-rule-of-nobody", "share-rule-of-server", "a rule that lets a host mount a share, and no server there "
         "has it", "a call was given up and done later, or " + _LOST,
         "the shared file system service removes the rule", Mender.CLEANUP),
    Defect("image-in-transit", "image-in-transit", "a snapshot that is queued or saving, and no action makes it",
         _AFTER, "the image service removes it", Mender.CLEANUP),
    Defect("service-registered", "service-registered", "a service that is needed, and the catalogue names none",
         "it was never registered, or in another region", "register it, or set its endpoint", Mender.OPERATOR),
)
# fmt: on

KINDS = {one.name: one for one in _ALL}
