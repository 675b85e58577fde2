# SPDX-License-Identifier: Apache-2.0
"""Documents of nft.

One replaces a whole table in one transaction, so a packet passes the old or the new rules.

A document with only the differences would take nft about 12 ms, and the whole one takes 60 to 170
ms (decision 0059). The functions are pure.
"""

from collections.abc import Iterable, Mapping

FAMILIES = ("bridge", "inet")


def delete_table(family: str, table: str) -> str:
    """Return the statements that delete a table, also without such a table."""
    return f"add table {family} {table}\ndelete table {family} {table}\n"


def replace_table(family: str, table: str, body: str) -> str:
    """Return the statements that replace a table."""
    return f"{delete_table(family, table)}table {family} {table} {{\n{body}}}\n"


def set_of(name: str, key_type: str, elements: Iterable[str]) -> str:
    """Return a set. ``key_type`` is nft's text with the flags."""
    return _declaration("set", name, key_type, dict.fromkeys(elements))


def map_of(name: str, key_type: str, elements: Mapping[str, str]) -> str:
    """Return a map. ``key_type`` is nft's text with the type of the values."""
    return _declaration(
        "map", name, key_type, [f"{key} : {value}" for key, value in elements.items()]
    )


def chain_of(name: str, lines: Iterable[str]) -> str:
    """Return a chain with one statement in each line."""
    return f"  chain {name} {{\n{indent(lines)}  }}\n"


def indent(lines: Iterable[str]) -> str:
    """Return the indented statements of a chain."""
    return "".join(f"    {line}\n" for line in lines)


def _declaration(object_type: str, name: str, key_type: str, elements: Iterable[str]) -> str:
    text = ", ".join(elements)
    return (
        f"  {object_type} {name} {{ {key_type};{f' elements = {{ {text} }};' if text else ''} }}\n"
    )
