# SPDX-License-Identifier: Apache-2.0
"""docs/doctor.md: the kinds of findings of ``kilonova doctor``.

    python -m deploy.site.doctor_page > docs/doctor.md

Run this after a change of ``deploy.operator.doctor.kinds``. A test compares the page with the
output.
"""

from __future__ import annotations

from deploy.operator.doctor.kinds import KINDS, Mender

HEAD = """# What the doctor finds

Made from the table in `deploy/operator/doctor/kinds.py` by `python -m deploy.site.doctor_page > docs/doctor.md`.

`kilonova doctor` compares the records with each other, and with what hosts, network, image and identity service say. It
tells each finding with its cause and its remedy; `--json` for programs. Its status is for monitoring: 0 nothing is
wrong, 1 something is, 3 nothing was found and somebody did not answer who should have.

`kilonova doctor --fix ID` carries a remedy out. It looks twice, and a third time in the transaction that writes: what
is not there any more is left alone, so it can be given twice. A server that an action has is left to it. What was
written to a server is an action `repair` of it, whose `args` say what stood there before.
"""
#: Heading and introduction of each way of repair.
WAYS = {
    Mender.ROWS: ("Rows", "Mended in one transaction."),
    Mender.REMOVAL: (
        "Guests to be removed",
        "Rows in one transaction; what has to go from a host is removed there by a command that is repeated until "
        "the host has confirmed it (`kilonova host debts`).",
    ),
    Mender.CLEANUP: (
        "Pending cleanups",
        "Left to conductors, who try until the neighbour has done it (`kilonova cleanup list`).",
    ),
    Mender.ACTION: (
        "Actions",
        "An ordinary action of the server, with its journal and its undo (`kilonova action list`).",
    ),
    Mender.GUEST: (
        "Guests without a record",
        "As `kilonova host adopt` and `discard` do, which ask all hosts first.",
    ),
    Mender.OPERATOR: (
        "For operators",
        "Not mended by `--fix`: nobody but an operator can say what is right.",
    ),
}


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for way, (heading, text) in WAYS.items():
        rows = [kind for kind in KINDS.values() if kind.way is way]
        parts.append(f"\n## {heading}\n\n{text}\n\n")
        parts.append("| kind | what is found | cause | remedy |\n| --- | --- | --- | --- |\n")
        parts += [
            f"| `{kind.name}` | {kind.detects} | {kind.cause} | {kind.remedy} |\n" for kind in rows
        ]
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
