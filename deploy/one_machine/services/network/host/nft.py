# SPDX-License-Identifier: Apache-2.0
"""The texts of nft documents.

A document replaces a whole table in one transaction, so a packet passes the old or the new rules.

A document with only the differences would take nft about 12 ms, and a whole document takes 60 to
170 ms (decision 0059). The functions are pure.
"""

from collections.abc import Iterable, Mapping

FAMILIES = ("bridge", "inet")


def delete_table(family: str, table: str) -> str:
    """Return the statements that delete a table. Without such a table they do nothing."""
    return f"add table {family} {table}\ndelete table {family} {table}\n"


def replace_table(family: str, table: str, body: str) -> str:
    """Return the statements that replace or create a table with the declarations ``body``."""
    return f"{delete_table(family, table)}table {family} {table} {{\n{body}}}\n"


def set_of(name: str, key_type: str, elements: Iterable[str]) -> str:
    """Return the text of a set.

    Args:
        name: The name of the set.
        key_type: nft's text for the type of the elements, with the flags.
        elements: The elements.
    """
    return _declaration("set", name, key_type, dict.fromkeys(elements))


def map_of(name: str, key_type: str, elements: Mapping[str, str]) -> str:
    """Return the text of a map.

    Args:
        name: The name of the map.
        key_type: nft's text for the types of keys and values.
        elements: Key -> value.
    """
    return _declaration(
        "map", name, key_type, [f"{key} : {value}" for key, value in elements.items()]
    )


def chain_of(name: str, lines: Iterable[str]) -> str:
    """Return the text of a chain with one statement in each line."""
    return f"  chain {name} {{\n{indent(lines)}  }}\n"


def indent(lines: Iterable[str]) -> str:
    """Return the statements of a chain as a text of indented lines."""
    return "".join(f"    {line}\n" for line in lines)


def _declaration(object_type: str, name: str, key_type: str, elements: Iterable[str]) -> str:
    text = ", ".join(elements)
    return (
        f"  {object_type} {name} {{ {key_type};{f' elements = {{ {text} }};' if text else ''} }}\n"
    )
