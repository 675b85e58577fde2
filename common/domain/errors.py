# SPDX-License-Identifier: Apache-2.0
"""Every error that a user can see, in one tree.

    Problem                    500, the public text of an unexpected failure
    ├── BadRequest             400  what is wrong with the request, naming the field
    ├── Unauthorized           401
    ├── Forbidden              403
    │   └── OverQuota          403  names the resource, the limit and what is used
    ├── NotFound               404  itemNotFound
    ├── NotAcceptable          406  a microversion out of range
    ├── Conflict               409
    │   ├── WrongState         409  Cannot 'x' instance y while it is in vm_state z
    │   ├── Locked             409
    │   ├── Busy               409  another action has the server
    │   └── HostDown           409  the host does not answer now
    ├── TooLarge               413
    ├── UnsupportedMediaType   415
    ├── NotImplementedHere     501
    └── Unavailable            503  a neighbour or the store does not answer; retry
        ├── NoAnswer           503  a peer did not answer within its time: unknown, not failed
        ├── Lost               503  compare-and-set found that another writer was first
        ├── TooBusy            503  others hold rows of the store that it needs; nothing was changed
        └── NoStore            503  the store does not answer at all
            ├── Unsure         503  nor did it say whether the change was made
            └── WrongSchema    503  it is of another version than this code

The text given is public; the cause (``raise … from``) goes to the log only. ``retryable`` says
whether the same request can succeed later without being changed.
"""

from __future__ import annotations


class Problem(Exception):
    """The root; raised itself only for what nobody foresaw."""

    status = 500
    kind = "computeFault"
    retryable = False

    def __init__(
        self, text: str = "Unexpected error. Give the request id to your operator."
    ) -> None:
        super().__init__(text)
        self.text = text


class BadRequest(Problem):
    status, kind = 400, "badRequest"


class Unauthorized(Problem):
    status, kind = 401, "unauthorized"


class Forbidden(Problem):
    status, kind = 403, "forbidden"


class OverQuota(Forbidden):
    """Quota exceeded; ``over`` maps each resource to (requested, used, limit)."""

    def __init__(self, over: dict[str, tuple[int, int, int]]) -> None:
        self.over = over
        names = ", ".join(over)
        asked = ", ".join(str(over[name][0]) for name in over)
        used = ", ".join(str(over[name][1]) for name in over)
        limit = ", ".join(str(over[name][2]) for name in over)
        super().__init__(
            f"Quota exceeded for {names}: Requested {asked}, but already used {used} of {limit} {names}"
        )


class NotFound(Problem):
    status, kind = 404, "itemNotFound"


class NotAcceptable(Problem):
    status, kind = 406, "computeFault"


class Conflict(Problem):
    status, kind = 409, "conflictingRequest"


class WrongState(Conflict):
    """The server is not in a state that allows the action."""

    def __init__(self, action: str, server: str, attribute: str, state: str | None) -> None:
        super().__init__(f"Cannot '{action}' instance {server} while it is in {attribute} {state}")


class Locked(Conflict):
    def __init__(self, server: str) -> None:
        super().__init__(f"Instance {server} is locked")


class Busy(Conflict):
    retryable = True

    """``action``: the name of the action that holds the server, where it is known."""

    def __init__(self, server: str, action: str | None = None) -> None:
        by = f"the action '{action}'" if action else "another action"
        super().__init__(f"Instance {server} is busy with {by}; try again when it has ended.")


class HostDown(Conflict):
    retryable = True


class TooLarge(Problem):
    status, kind = 413, "overLimit"


class UnsupportedMediaType(Problem):
    status, kind = 415, "badMediaType"


class NotImplementedHere(Problem):
    status, kind = 501, "notImplemented"


class Unavailable(Problem):
    """``wait``: seconds before which it is of no use to ask again, as who is asked has said."""

    status, kind, retryable = 503, "serviceUnavailable", True

    def __init__(self, text: str, wait: float = 0) -> None:
        super().__init__(text)
        self.wait = wait


class NoAnswer(Unavailable):
    pass


class Lost(Unavailable):
    pass


class TooBusy(Unavailable):
    def __init__(self, text: str = "The database is too busy; try again.") -> None:
        super().__init__(text)


class NoStore(Unavailable):
    def __init__(self, text: str = "The database does not answer; try again.") -> None:
        super().__init__(text)


class WrongSchema(NoStore):
    pass


class Unsure(NoStore):
    def __init__(
        self,
        text: str = "The database did not say whether this was done; look before you ask again.",
    ) -> None:
        super().__init__(text)


class ConfigError(Exception):
    """A wrong or missing value; the text names the option and what is allowed."""
