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

`kilonova doctor` compares the records with each other, and with the answers of hosts and of the network, image, block
storage, shared file system and identity services. It prints each finding with its cause and remedy (`--json` for
programs). Exit status: 0 no findings, 1 findings, 3 no findings but a host or service did not answer.

`kilonova doctor --fix ID` runs the remedy of a finding. The command checks twice, and a third time in the transaction
that writes. A finding that does not exist any more is left alone, so the command may be repeated. A server with a
running action is left to that action. Changes of a server are recorded as an action `repair`, whose `args` contain the
old values.
"""
#: Heading and introduction of each way of repair.
WAYS = {
    Mender.ROWS: ("Rows", "Repaired in one transaction."),
    Mender.REMOVAL: (
        "Guests to be removed",
        "Rows are repaired in one transaction. The host removes guests by a command that is repeated until the host "
        "has confirmed it (`kilonova host removals`).",
    ),
    Mender.CLEANUP: (
        "Pending cleanups",
        "Conductors retry until the external service has done it (`kilonova cleanup list`).",
    ),
    Mender.ACTION: (
        "Actions",
        "An ordinary action of the server, with journal and undo (`kilonova action list`).",
    ),
    Mender.GUEST: (
        "Guests without a record",
        "Repaired as by `kilonova host adopt` and `discard`, which query all hosts first.",
    ),
    Mender.OPERATOR: (
        "For operators",
        "`--fix` does not repair these, because only an operator can decide.",
    ),
}


def page() -> str:
    """Generate docs/doctor.md from the table ``KINDS``, and return the text."""
    parts = [HEAD]
    for way, (heading, text) in WAYS.items():
        rows = [kind for kind in KINDS.values() if kind.way is way]
        parts.append(f"\n## {heading}\n\n{text}\n\n")
        parts.append("| kind | finding | cause | remedy |\n| --- | --- | --- | --- |\n")
        parts += [
            f"| `{kind.name}` | {kind.detects} | {kind.cause} | {kind.remedy} |\n" for kind in rows
        ]
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
