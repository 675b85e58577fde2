# SPDX-License-Identifier: Apache-2.0
"""Every error that a user can see, in one tree.

    Problem                    500, the public text of an unexpected failure
    ├── BadRequest             400  the request is invalid, the text names the field
    ├── Unauthorized           401
    ├── Forbidden              403
    │   └── OverQuota          403  names the resource, the limit and the usage
    ├── NotFound               404  itemNotFound
    ├── NotAcceptable          406  a microversion out of range
    ├── Conflict               409
    │   ├── WrongState         409  Cannot 'x' instance y while it is in vm_state z
    │   ├── Locked             409
    │   ├── Busy               409  another action of the server is running
    │   └── HostDown           409  the host does not answer now
    ├── TooLarge               413
    ├── UnsupportedMediaType   415
    ├── NotImplementedHere     501
    └── Unavailable            503  an external service or the database does not answer: retry
        ├── NoAnswer           503  a peer did not answer in time: the outcome is unknown
        ├── TooBusy            503  other transactions hold the rows, no row was changed
        └── NoStore            503  the database does not answer
            ├── TooSlow        503  a statement reached the time limit of the database
            ├── Unsure         503  the database did not confirm whether the change was committed
            └── WrongSchema    503  the schema is of another version than this code

The text of an error is public. Its cause (``raise … from``) goes only to the log. ``retryable`` is
True if the same request can succeed later.
"""

from __future__ import annotations


class Problem(Exception):
    """The root of the errors. Raised itself only for unexpected failures."""

    status = 500
    kind = "computeFault"
    retryable = False

    def __init__(
        self, text: str = "Unexpected error. Give the request id to your operator."
    ) -> None:
        super().__init__(text)
        self.text = text


class BadRequest(Problem):
    """The request is invalid or cannot be served as requested."""

    status, kind = 400, "badRequest"


class Unauthorized(Problem):
    """The token or ticket of the request is missing or not accepted."""

    status, kind = 401, "unauthorized"


class Forbidden(Problem):
    """The caller may not do this, for example by a policy rule."""

    status, kind = 403, "forbidden"


class OverQuota(Forbidden):
    """Quota exceeded. ``over`` maps each resource to (requested, used, limit)."""

    def __init__(self, over: dict[str, tuple[int, int, int]]) -> None:
        self.over = over
        names = ", ".join(over)
        requested = ", ".join(str(over[name][0]) for name in over)
        used = ", ".join(str(over[name][1]) for name in over)
        limit = ", ".join(str(over[name][2]) for name in over)
        super().__init__(
            f"Quota exceeded for {names}: Requested {requested}, but already used {used} of {limit} {names}"
        )


class NotFound(Problem):
    """The object does not exist, or the caller may not see it."""

    status, kind = 404, "itemNotFound"


class NotAcceptable(Problem):
    """The API does not support the requested microversion."""

    status, kind = 406, "computeFault"


class Conflict(Problem):
    """The request conflicts with the present state of an object."""

    status, kind = 409, "conflictingRequest"


class WrongState(Conflict):
    """The state of the server does not allow the action."""

    def __init__(self, action: str, server: str, attribute: str, state: str | None) -> None:
        super().__init__(f"Cannot '{action}' instance {server} while it is in {attribute} {state}")


class Locked(Conflict):
    """The server is locked, and the caller is not an admin."""

    def __init__(self, server: str) -> None:
        super().__init__(f"Instance {server} is locked")


class Busy(Conflict):
    """Another action of the server is running. ``action`` is its name, or None if unknown."""

    retryable = True

    def __init__(self, server: str, action: str | None = None) -> None:
        by = f"the action '{action}'" if action else "another action"
        super().__init__(f"Instance {server} is busy with {by}; try again when it has ended.")


class HostDown(Conflict):
    """A host that the request needs does not answer now."""

    retryable = True


class TooLarge(Problem):
    """The request is larger than Kilonova or an external service accepts."""

    status, kind = 413, "overLimit"


class UnsupportedMediaType(Problem):
    """The API does not accept the Content-Type of the request."""

    status, kind = 415, "badMediaType"


class NotImplementedHere(Problem):
    """Kilonova does not implement the operation, or the cloud lacks a service for it."""

    status, kind = 501, "notImplemented"


class Unavailable(Problem):
    """An external service or the database does not answer.

    ``wait`` is the number of seconds after which that service accepts a retry. 0: not specified.
    """

    status, kind, retryable = 503, "serviceUnavailable", True

    def __init__(self, text: str, wait: float = 0) -> None:
        super().__init__(text)
        self.wait = wait


class NoAnswer(Unavailable):
    """A peer, for example a host or libvirt, did not answer in time. The outcome is unknown."""


class TooBusy(Unavailable):
    """Other transactions hold the rows. No row was changed."""

    def __init__(self, text: str = "The database is too busy; try again.") -> None:
        super().__init__(text)


class NoStore(Unavailable):
    """The database does not answer, or no connection is free."""

    def __init__(self, text: str = "The database does not answer; try again.") -> None:
        super().__init__(text)


class TooSlow(NoStore):
    """The database ended a statement that reached [database] statement_timeout."""

    def __init__(
        self, text: str = "The database ended a statement of this request at its time limit."
    ) -> None:
        super().__init__(text)


class WrongSchema(NoStore):
    """The schema of the database is of another version than this code."""


class Unsure(NoStore):
    """The database did not confirm whether the change was committed."""

    def __init__(
        self,
        text: str = "The database did not confirm whether this was done; check before you repeat the request.",
    ) -> None:
        super().__init__(text)


class ConfigError(Exception):
    """An option is missing or wrong. The text names the option and the allowed values."""
