# SPDX-License-Identifier: Apache-2.0
"""The verbs of hosts: what a conductor can have a host do with a server, and what is known of each
verb.

``VERBS`` is the one table of these facts. The agent has a function for each verb
(``compute_agent.verbs``) and runs it as its row says; the scheduler counts the verbs that copy
disks; the tickets of the image gateway open the images that a verb reads or writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: A command about another command: abort a live migration that is under way, or complete it. It is
#: no row of the table.
CONTROL = "steer"

_IMAGE_OF_GUEST = ("guest", "image")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbFacts:
    """One row of the table."""

    #: It may start a guest. The host must have had a lease since the command was sent, and waits
    #: until every guest that must not run there is off.
    starts: bool = False
    #: It needs such a lease too, although it starts no guest.
    needs_lease: bool = False
    #: It is journalled before it begins and is never repeated; its effect cannot be checked.
    once: bool = False
    #: It is repeated until it succeeds; no failure is definite and none is reported.
    retry_until_done: bool = False
    #: Its result decides which of two hosts has the guest: only ``VerbFailed`` is a failure, any
    #: other is retried.
    authoritative: bool = False
    #: It makes disks from an image; a limited number run at a time.
    builds: bool = False
    #: It copies whole disks, which takes minutes; one worker stays free of these verbs.
    copies: bool = False
    #: It migrates a running guest to another host: a limited number run at a time. It is journalled
    #: when it begins; before that an abort ends it at once.
    migrates: bool = False
    #: It mostly waits for the guest, so it occupies no worker.
    waits: bool = False
    #: The keys that lead, in the command's arguments, to the image that it may read; () for none.
    reads_image: tuple[str, ...] = ()
    #: The key of the command's arguments with the id of the image that it writes; "" for none.
    writes_image: str = ""


#: ``arrived`` starts nothing: the guest runs already at the destination; ``live_migrate`` started
#: it there.
VERBS: Mapping[str, VerbFacts] = {
    "ensure_guest": VerbFacts(starts=True, builds=True, copies=True, reads_image=_IMAGE_OF_GUEST),
    "ensure_running": VerbFacts(starts=True),
    "ensure_stopped": VerbFacts(waits=True),
    "reboot": VerbFacts(starts=True, waits=True),
    "ensure_paused": VerbFacts(),
    "ensure_suspended": VerbFacts(),
    "rebuild": VerbFacts(starts=True, builds=True, copies=True, reads_image=_IMAGE_OF_GUEST),
    "rescue": VerbFacts(starts=True, builds=True, copies=True, reads_image=("image",)),
    "unrescue": VerbFacts(starts=True),
    "attach_interface": VerbFacts(),
    "detach_interface": VerbFacts(),
    "attach_share": VerbFacts(),
    "detach_share": VerbFacts(),
    "attach_volume": VerbFacts(),
    "detach_volume": VerbFacts(waits=True),
    "disconnect_volumes": VerbFacts(),
    "extend_volume": VerbFacts(),
    "copy_volume": VerbFacts(copies=True, waits=True),
    "switch_volume": VerbFacts(waits=True, retry_until_done=True),
    "keep_volume": VerbFacts(retry_until_done=True),
    "snapshot_volume": VerbFacts(),
    "merge_volume": VerbFacts(copies=True, waits=True),
    "snapshot": VerbFacts(copies=True, writes_image="image_id"),
    "inject_nmi": VerbFacts(once=True),
    "set_password": VerbFacts(once=True),
    "ensure_absent": VerbFacts(retry_until_done=True),
    "offer": VerbFacts(),
    "prepare": VerbFacts(copies=True, needs_lease=True, reads_image=_IMAGE_OF_GUEST),
    "receive": VerbFacts(copies=True, needs_lease=True, reads_image=_IMAGE_OF_GUEST),
    "install": VerbFacts(starts=True),
    "resize_here": VerbFacts(starts=True, copies=True),
    "settle_resize": VerbFacts(needs_lease=True),
    "prepare_arrival": VerbFacts(copies=True, needs_lease=True, reads_image=_IMAGE_OF_GUEST),
    "live_migrate": VerbFacts(starts=True, copies=True, migrates=True, authoritative=True),
    "arrived": VerbFacts(authoritative=True),
}
#: What is assumed of a verb of a later release.
UNKNOWN = VerbFacts()
#: The verbs that copy whole disks, and so load the disk and the network of their host.
COPYING = frozenset(name for name, facts in VERBS.items() if facts.copies)


def facts_of(verb: str) -> VerbFacts:
    """The row of a verb; that of a later release has no facts."""
    return VERBS.get(verb, UNKNOWN)
