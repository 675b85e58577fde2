# SPDX-License-Identifier: Apache-2.0
"""The errors of a service in one table: status -> kind -> message with {words} from the request."""

from collections.abc import Mapping

import falcon

#: Words from a client are cut to this length.
MAX_WORD_LENGTH = 500


class Fault(falcon.HTTPError):
    """An error of a kind from the service's table."""

    def __init__(self, kind: str, status: int, message: str) -> None:
        headers = {"Retry-After": "0"} if status == 413 else None
        super().__init__(status, description=message, headers=headers)
        self.kind = kind


class FaultTable:
    """Creates the errors of a service from a table."""

    def __init__(self, faults: Mapping[int, Mapping[str, str]]) -> None:
        self._faults = {
            kind: (status, message)
            for status, messages in faults.items()
            for kind, message in messages.items()
        }

    def fault(self, kind: str, **words: object) -> Fault:
        """Return the error of this kind. The caller raises it.

        Args:
            kind: A kind of the table. An unknown kind is a bug.
            words: The values for all words in braces of the message. They are cut to
                ``MAX_WORD_LENGTH``.
        """
        status, message = self._faults[kind]
        cut = {name: str(word)[:MAX_WORD_LENGTH] for name, word in words.items()}
        return Fault(kind, status, message.format(**cut))
