# SPDX-License-Identifier: Apache-2.0
"""Docstrings, comments, names and pages stay within the limits of docs/style.md.

The limits hold in each package, each folder of tests, and the pages. A failure lists the places of
every pattern over its limit.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.test_house_rules import PACKAGES, ROOT, find, name_of, sources

#: Hits per 1,000 words: pattern, and limit.
WORDS = {
    "what, who": (r"\b(?:what|whatever|who|whom|whose)\b", 2.0),
    "say, ask": (r"\b(?:tell|telling|says?|said|asks?|asked|hears?|heard)\b", 1.0),
    "nothing, none": (r"\b(?:everybody|nothing|(?-i:none))\b", 2.0),
    "ones": (
        r"\b(?:one|ones|those) (?:which|who|whose|of|is|are|has|have)\b|\bthose that\b"
        r"|\b(?:this|that|each|another|no|every) one\b|\bones\b",
        1.5,
    ),
    "it, its": (r"\b(?:it|its)\b", 13.0),
    "semicolons": (r";", 2.0),
}
#: These words are never needed, except in a quotation.
NEVER = re.compile(r"\b(?:whoever|nobody|somebody|told|tells|ones? that)\b|(?-i:\bis none\b)", re.I)
QUOTATION = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"")

PARTICIPLE = re.compile(
    r"_*(?:made|found|kept|told|said|shown|known|taken|given|held|left|lost|sent|begun|done|gone"
    r"|seen|built|written|[a-z]+ed)"
)
PREDICATE = ("is_", "has_", "can_", "was_", "needs_")
CLAUSE = re.compile(r"_(?:that|which|who|whose|what|where)_")
ARTICLE = re.compile(
    r"test_(?:an?|the|each|every|one|no|nothing|all|any|some|both|what|who|where|whose|its?|only"
    r"|there|that|those|this|none)_"
)
SHORT_DOCSTRING = 5  # words
LONG_TEST_NAME = 70  # letters
#: Quoted texts before a comment may contain the sign.
COMMENT = re.compile(r"""(?:[^"'#]|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')*(#.*)""")
NOT_PROSE = re.compile(r"SPDX|noqa|type:|^#!")


@dataclass(frozen=True)
class Place:
    """A text, or a name, with its place."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {' '.join(self.text.split())[:120]}"


@dataclass
class Area:
    """The texts and names of one package, one folder of tests, or the pages."""

    prose: list[Place] = field(default_factory=list)
    docstrings: list[Place] = field(default_factory=list)
    functions: list[Place] = field(default_factory=list)
    tests: list[Place] = field(default_factory=list)

    def words(self) -> int:
        return sum(map(count_words, self.prose))

    def add(self, other: Area) -> None:
        self.prose += other.prose
        self.docstrings += other.docstrings
        self.functions += other.functions
        self.tests += other.tests


def count_words(place: Place) -> int:
    return len(re.findall(r"[A-Za-z']+", place.text))


def read_page(path: Path, area: Area) -> None:
    """Add a page's lines without code."""
    text = re.sub(r"(?ms)^```.*?^```", lambda code: "\n" * code[0].count("\n"), path.read_text())
    name = name_of(path)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("    "):
            area.prose.append(Place(name, number, re.sub(r"`[^`]*`|\]\([^)]*\)", " ", line)))


def read_module(path: Path, area: Area) -> None:
    """Add the docstrings, comments and names of a Python file."""
    name = name_of(path)
    for node in (*find(path, ast.Module), *find(path, ast.ClassDef), *find(path, ast.FunctionDef)):
        if docstring := ast.get_docstring(node):
            area.prose.append(Place(name, node.body[0].lineno, docstring))
    for function in find(path, ast.FunctionDef):
        if docstring := ast.get_docstring(function):
            area.docstrings.append(Place(name, function.body[0].lineno, docstring))
        is_test = function.name.startswith("test_")
        if is_test or not function.name.strip("_").startswith(PREDICATE):
            names = area.tests if is_test else area.functions
            names.append(Place(name, function.lineno, function.name))
    in_texts = {
        number
        for node in (*find(path, ast.Constant), *find(path, ast.JoinedStr))
        if node.end_lineno != node.lineno
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if "#" in line and number not in in_texts:
            comment = COMMENT.match(line)
            if comment and not NOT_PROSE.search(comment[1]):
                area.prose.append(Place(name, number, comment[1].lstrip("#: ")))


def areas() -> dict[str, Area]:
    """Return the areas by name. An area of fewer than 1,000 words counts with its package."""
    by_name: dict[str, Area] = defaultdict(Area)
    for path in sources(*PACKAGES, "tests"):
        read_module(path, by_name["/".join(path.relative_to(ROOT).parent.parts[:2])])
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]:
        read_page(path, by_name["docs"])
    for name in [name for name, area in by_name.items() if "/" in name and area.words() < 1000]:
        by_name[name.partition("/")[0]].add(by_name.pop(name))
    return dict(by_name)


def excesses(area: Area) -> Iterator[tuple[str, list[Place]]]:
    """Yield each measure over its limit, with its places."""
    words = area.words()
    for name, (pattern, limit) in WORDS.items():
        places = [
            place for place in area.prose for _ in re.findall(pattern, place.text, re.IGNORECASE)
        ]
        if 1000 * len(places) > limit * words:
            yield f"{name}: {1000 * len(places) / words:.1f} in 1,000 words, limit {limit}", places
    for name, limit, texts, places in (
        (
            "docstrings of five words or fewer",
            7,
            area.docstrings,
            [text for text in area.docstrings if count_words(text) <= SHORT_DOCSTRING],
        ),
        (
            "participles as function names",
            2,
            area.functions,
            [text for text in area.functions if PARTICIPLE.fullmatch(text.text)],
        ),
        (
            "tests with a relative clause",
            1,
            area.tests,
            [text for text in area.tests if CLAUSE.search(text.text)],
        ),
        (
            "tests with an article or pronoun first",
            9,
            area.tests,
            [text for text in area.tests if ARTICLE.match(text.text)],
        ),
        (
            "tests with a name over 70 letters",
            2,
            area.tests,
            [text for text in area.tests if len(text.text) > LONG_TEST_NAME],
        ),
    ):
        if texts and 100 * len(places) > limit * len(texts):
            yield f"{name}: {100 * len(places) / len(texts):.1f} %, limit {limit} %", places


def find_excesses(name: str, area: Area) -> Iterator[str]:
    """Yield the lines of a report about the area, with a line for each place."""
    never = [
        place
        for place in area.prose
        if not place.file.endswith("docs/style.md") and NEVER.search(QUOTATION.sub(" ", place.text))
    ]
    for measure, places in [*excesses(area), *([("never needed", never)] if never else [])]:
        yield f"{name}: {measure}"
        yield from (f"  {place}" for place in places)


def test_language_of_all_areas_is_within_limits() -> None:
    report = [line for name, area in sorted(areas().items()) for line in find_excesses(name, area)]
    assert not report, "\n".join(report)
