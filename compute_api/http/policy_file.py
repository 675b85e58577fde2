# SPDX-License-Identifier: Apache-2.0
"""An operator's policy file: its rules with their lines.

oslo.policy takes what it cannot parse for "nobody may" and an empty value for "everybody may", and
never returns from rules that refer to one another. Here such a file is refused with its line, so
that a mistake neither locks everybody out nor lets anybody in. A valid file means what it means to
oslo.policy."""

from __future__ import annotations

import difflib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from inspect import getfullargspec
from pathlib import Path
from typing import cast

import yaml
from oslo_policy import policy
from oslo_policy._checks import AndCheck, BaseCheck, NotCheck, OrCheck

from common.domain.errors import ConfigError
from common.domain.json_types import JsonMapping, JsonObject
from compute_api.http.policy_rules import RuleSet

#: It tells with a traceback what is refused here in a line.
logging.getLogger("oslo_policy._parser").setLevel(logging.CRITICAL)
#: A caller as checks see one.
SOMEBODY: JsonObject = {
    "user_id": "",
    "project_id": "",
    "user_domain_id": None,
    "project_domain_id": None,
    "domain_id": None,
    "system_scope": None,
    "roles": [],
    "service_roles": [],
    "is_admin_project": True,
}


#: Checks in a text, or oslo.policy's older form: alternatives, each a check or a list of checks.
FileCheck = str | list["FileCheck"]


@dataclass(frozen=True, slots=True)
class FileRule:
    """What a file says of a rule: who may, in oslo.policy's language, and in which line."""

    check: FileCheck
    line: int


@policy.register("is_admin")
class IsAdmin(policy.Check):
    """Nova's check: whether the caller is an admin, as the rule context_is_admin has it."""

    def __call__(
        self,
        target: Mapping[str, object],
        creds: MutableMapping[str, object],
        enforcer: policy.Enforcer,
        current_rule: str | None = None,
    ) -> bool:
        own = {"user_id": creds["user_id"], "project_id": creds["project_id"]}
        is_admin = policy.RuleCheck("rule", "context_is_admin")(own, creds, enforcer)
        return bool(is_admin) == (self.match.lower() == "true")


def parsed(name: str, check: FileCheck) -> BaseCheck:
    """A rule as oslo.policy evaluates it."""
    return _direct(policy.RuleDefault(name, cast(str, check)).check)  # a list does as well


#: What a check is called with: target, credentials, enforcer, and the name of the rule.
Facts = tuple[Mapping[str, object], MutableMapping[str, object], policy.Enforcer, str | None]


class _Direct(BaseCheck):
    """A check that calls its parts without inspecting their signatures."""

    def decide(self, facts: Facts) -> bool:
        raise NotImplementedError

    def __call__(
        self,
        target: Mapping[str, object],
        creds: MutableMapping[str, object],
        enforcer: policy.Enforcer,
        current_rule: str | None = None,
    ) -> bool:
        return self.decide((target, creds, enforcer, current_rule))


class _All(_Direct, AndCheck):
    def decide(self, facts: Facts) -> bool:
        return all(rule(*facts) for rule in self.rules)


class _Either(_Direct, OrCheck):
    def decide(self, facts: Facts) -> bool:
        return any(rule(*facts) for rule in self.rules)


class _Not(_Direct, NotCheck):
    def decide(self, facts: Facts) -> bool:
        return not self.rule(*facts)


class _Named(_Direct, policy.RuleCheck):
    def decide(self, facts: Facts) -> bool:
        try:
            return bool(facts[2].rules[self.match](*facts))
        except KeyError:
            return False


class _WithoutRule(_Direct, policy.Check):
    """The check of another distribution that takes no name of a rule."""

    def __init__(self, check: policy.Check) -> None:
        super().__init__(check.kind, check.match)
        self._check = check

    def decide(self, facts: Facts) -> bool:
        return bool(self._check(*facts[:3]))


def _direct(check: BaseCheck) -> BaseCheck:
    """Return a check with the same meaning that calls its parts directly.

    Why: oslo.policy inspects the signature of each part at each evaluation, which takes most of
    the time of an answer. Here it is inspected once.
    """
    match check:
        case AndCheck():
            return _All([_direct(rule) for rule in check.rules])
        case OrCheck():
            return _Either([_direct(rule) for rule in check.rules])
        case NotCheck():
            return _Not(cast(policy.Check, _direct(check.rule)))
        case policy.RuleCheck():
            return _Named(check.kind, check.match)
        # As oslo.policy decides it: the instance, target, credentials and enforcer, or one more.
        case policy.Check() if len(getfullargspec(check.__call__).args) <= 4:
            return _WithoutRule(check)
    return check


def read(path: str) -> dict[str, FileRule]:
    """What the file says.

    Raises:
        ConfigError: it is not there, is no YAML, or one of its rules cannot be; the text begins
        with file and line.
    """
    try:
        text = Path(path).read_text()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: this is no UTF-8") from problem
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        raise ConfigError(
            f"{path}:{mark.line + 1 if mark else 1}: this is no YAML: {problem.problem}"
        ) from problem
    except yaml.reader.ReaderError as problem:
        line = text[: problem.position].count("\n") + 1
        raise ConfigError(f"{path}:{line}: this is no YAML: {problem.reason}") from problem
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f'{path}:{node.start_mark.line + 1}: write rules as "name": "who may"')
    return {key.value: said for key, said in _rules(path, node)}


def _rules(path: str, node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, FileRule]]:
    lines: dict[str, int] = {}
    for key, value in node.value:
        at = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{at}: a rule's name is a text")
        if key.value in lines:
            raise ConfigError(f"{at}: {key.value} is in line {lines[key.value]} already")
        lines[key.value] = key.start_mark.line + 1
        try:
            check = _value(value)
            _check(check)
        except ValueError as problem:
            raise ConfigError(f"{at}: {key.value}: {problem}") from problem
        yield key, FileRule(check, lines[key.value])


def _value(node: yaml.Node) -> FileCheck:
    """A rule's text, or oslo.policy's older form: a list of alternatives, each a check or a list of
    checks."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(part) for part in node.value]
    is_text = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
    if not is_text or (not node.value and node.style not in ("'", '"')):
        raise ValueError('who may is a text in quotes: "!" for nobody, "@" for everybody')
    return str(node.value)


def words(check: FileCheck | BaseCheck) -> list[str]:
    """The single checks of a rule, in order, without what joins them."""
    if isinstance(check, list):
        return [word for part in check for word in words(part)]
    found = (part.strip("()") for part in str(check).split())
    return [word for word in found if word and word.lower() not in ("and", "or", "not")]


def _check(check: FileCheck) -> None:
    """Raises ValueError for what oslo.policy does not understand: of that it keeps other words, or
    cannot evaluate it for anybody."""
    wanted = words(check)
    if isinstance(check, list) and any(
        isinstance(deep, list) for part in check if isinstance(part, list) for deep in part
    ):
        raise ValueError("lists in lists in lists mean nothing")
    if check and wanted != words(parsed("", check)):
        raise ValueError(
            f"{check!r} cannot be parsed; join checks like role:member with and, or, not and brackets"
        )
    for word in wanted:
        kind, _, match = word.partition(":")
        try:
            if kind in ("http", "https"):
                match % defaultdict(str)
            elif kind not in ("rule", "is_admin"):
                evaluate: Callable[..., object] = parsed("", word)
                evaluate(defaultdict(str), SOMEBODY, None)
        except Exception as problem:
            raise ValueError(f"{word!r} cannot be evaluated: {problem}") from problem


def references(check: FileCheck) -> list[str]:
    """The rules that a rule refers to."""
    found = (word.partition(":") for word in words(check))
    return [
        "context_is_admin" if kind == "is_admin" else name
        for kind, _, name in found
        if kind in ("rule", "is_admin")
    ]


def cycle(rules: JsonMapping) -> list[str]:
    """Rules that are made of one another, the first one again at the end; [] when there are
    none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done or name not in rules:
            return []
        for part in references(rules[name]):
            if found := walk(part, [*way, name]):
                return found
        done.add(name)
        return []

    for name in rules:
        if found := walk(name, []):
            return found
    return []


@dataclass(frozen=True, slots=True)
class MergedRules:
    """The defaults with a file over them: who may, the line of those that the file says, and what
    it says in vain."""

    checks: JsonMapping
    lines: Mapping[str, int]
    warnings: Sequence[str]


def merged(path: str, rules: RuleSet) -> MergedRules:
    """Put what the file says over the defaults.

    As oslo.policy has it, a former name counts for the new ones that the file does not name, unless
    it is there with its default of then, or as what the new one is.

    Raises:
        ConfigError: as of ``read``, or rules are made of one another without end.
    """
    said, defaults = read(path), rules.all_defaults
    renamed = {
        name: old
        for name in defaults
        if name not in said
        for old, default in rules.former(name)
        if old in said and said[old].check not in (default, f"rule:{name}")
    }
    sources = {**renamed, **{name: name for name in said}}
    checks = {**defaults, **{name: said[source].check for name, source in sources.items()}}
    if found := cycle(checks):
        line = min(said[sources[name]].line for name in found if name in sources)
        raise ConfigError(f"{path}:{line}: these rules are made of one another: {', '.join(found)}")
    warnings = [
        f"{path}:{line}: {text}"
        for line, text in _warnings(said, checks, rules, set(renamed.values()))
    ]
    return MergedRules(
        checks, {name: said[source].line for name, source in sources.items()}, warnings
    )


def _warnings(
    said: Mapping[str, FileRule], checks: JsonMapping, rules: RuleSet, meant: Collection[str]
) -> Iterator[tuple[int, str]]:
    """What the file says in vain, or under a former name; ``meant``: former names that count."""
    used = {part for check in checks.values() for part in references(check)}
    defaults = rules.all_defaults
    for name, rule in said.items():
        for part in references(rule.check):
            if part not in checks:
                yield (
                    rule.line,
                    f"{name}: there is no rule {part}, so nobody passes it{_nearest(part, checks)}",
                )
        if name in defaults or name in used:
            continue
        if name in rules.former_names:
            counts = "a former name" if name in meant else "a former name and has no effect"
            yield rule.line, f"{name} is {counts}; now: {', '.join(rules.former_names[name][1])}"
        elif name in rules.unsupported:
            yield rule.line, f"{name} has no effect: this cloud has no such operation"
        else:
            yield (
                rule.line,
                f"{name} has no effect: there is no such rule{_nearest(name, defaults)}",
            )


def _nearest(name: str, known: JsonMapping) -> str:
    found = difflib.get_close_matches(name, [one for one in known if one != name], 1)
    return f"; did you mean {found[0]}?" if found else ""
