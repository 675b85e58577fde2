# SPDX-License-Identifier: Apache-2.0
"""Read an operator's policy file, with the line of each rule.

oslo.policy treats an unparsable check as "always deny" and an empty value as "always allow", and
never returns from rules that refer to each other. This module rejects such files with the line, so
that a mistake neither denies nor allows all requests. A valid file has the same meaning as in
oslo.policy.
"""

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

#: The parser logs a traceback for each error that is reported here in one line.
logging.getLogger("oslo_policy._parser").setLevel(logging.CRITICAL)
#: Credentials for a trial evaluation of checks.
TRIAL_CREDENTIALS: JsonObject = {
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


#: A check string, or oslo.policy's legacy form: a list of alternatives, each a check or a list of
#: checks.
FileCheck = str | list["FileCheck"]


@dataclass(frozen=True, slots=True)
class FileRule:
    """A rule of a file: its check in the language of oslo.policy, and its line."""

    check: FileCheck
    line: int


@policy.register("is_admin")
class IsAdmin(policy.Check):
    """Nova's check ``is_admin:True``: whether the rule context_is_admin holds for the caller.

    With any other text after the colon, for example ``is_admin:False``, the check is the opposite.
    """

    def __call__(
        self,
        target: Mapping[str, object],
        creds: MutableMapping[str, object],
        enforcer: policy.Enforcer,
        current_rule: str | None = None,
    ) -> bool:
        own_target = {"user_id": creds["user_id"], "project_id": creds["project_id"]}
        is_admin = policy.RuleCheck("rule", "context_is_admin")(own_target, creds, enforcer)
        return bool(is_admin) == (self.match.lower() == "true")


def parse(name: str, check: FileCheck) -> BaseCheck:
    """Return the check as an object of oslo.policy, which the enforcer can evaluate.

    A text that cannot be parsed becomes a check that always denies.

    Args:
        name: Name of the rule.
        check: A check string, or oslo.policy's legacy form with lists.
    """
    # RuleDefault accepts lists too.
    return _make_direct(policy.RuleDefault(name, cast(str, check)).check)


#: Arguments of a check: target, credentials, enforcer, and the name of the rule.
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
    """A third-party check without a parameter for the name of the rule."""

    def __init__(self, check: policy.Check) -> None:
        super().__init__(check.kind, check.match)
        self._check = check

    def decide(self, facts: Facts) -> bool:
        return bool(self._check(*facts[:3]))


def _make_direct(check: BaseCheck) -> BaseCheck:
    """Return a check with the same meaning that calls its parts directly.

    Why: oslo.policy inspects the signature of each part at each evaluation, which takes most of the
    time of a check. This function inspects each signature once.
    """
    match check:
        case AndCheck():
            return _All([_make_direct(rule) for rule in check.rules])
        case OrCheck():
            return _Either([_make_direct(rule) for rule in check.rules])
        case NotCheck():
            return _Not(cast(policy.Check, _make_direct(check.rule)))
        case policy.RuleCheck():
            return _Named(check.kind, check.match)
        # As in oslo.policy: a check without the parameter for the rule has at most four arguments.
        case policy.Check() if len(getfullargspec(check.__call__).args) <= 4:
            return _WithoutRule(check)
    return check


def read(path: str) -> dict[str, FileRule]:
    """Return the rules of the file, by name.

    Raises:
        ConfigError: The file is missing, not valid YAML, or contains an invalid or repeated rule.
            The text begins with the file, and the line unless the file cannot be read.
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
        raise ConfigError(f'{path}:{node.start_mark.line + 1}: write rules as "name": "check"')
    return {key.value: rule for key, rule in _read_rules(path, node)}


def _read_rules(path: str, node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, FileRule]]:
    lines: dict[str, int] = {}
    for key, value in node.value:
        at = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{at}: the name of a rule must be a text")
        if key.value in lines:
            raise ConfigError(f"{at}: {key.value} is in line {lines[key.value]} already")
        lines[key.value] = key.start_mark.line + 1
        try:
            check = _parse_value(value)
            _check_rule(check)
        except ValueError as problem:
            raise ConfigError(f"{at}: {key.value}: {problem}") from problem
        yield key, FileRule(check, lines[key.value])


def _parse_value(node: yaml.Node) -> FileCheck:
    """Return the check in the YAML value of a rule. A list becomes a list of checks.

    Raises:
        ValueError: The value or an item is not a text, or is empty without quotes.
    """
    if isinstance(node, yaml.SequenceNode):
        return [_parse_value(part) for part in node.value]
    is_text = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str"
    if not is_text or (not node.value and node.style not in ("'", '"')):
        raise ValueError('the check must be a text in quotes, for example "!" (always deny)')
    return str(node.value)


def words(check: FileCheck | BaseCheck) -> list[str]:
    """Return the single checks of a rule, in order, without brackets, "and", "or" and "not"."""
    if isinstance(check, list):
        return [word for part in check for word in words(part)]
    parts = (part.strip("()") for part in str(check).split())
    return [word for word in parts if word and word.lower() not in ("and", "or", "not")]


def _check_rule(check: FileCheck) -> None:
    """Check that oslo.policy can parse and evaluate the rule.

    This sends no request for checks with http or https, and follows no reference to other rules.

    Raises:
        ValueError: The parsed rule lacks parts of the text, a part cannot be evaluated, or lists
            are nested more than twice.
    """
    parts = words(check)
    if isinstance(check, list) and any(
        isinstance(deep, list) for part in check if isinstance(part, list) for deep in part
    ):
        raise ValueError("a list in a list must contain checks and no further lists")
    if check and parts != words(parse("", check)):
        raise ValueError(
            f"{check!r} cannot be parsed; join checks like role:member with and, or, not and brackets"
        )
    for word in parts:
        kind, _, match = word.partition(":")
        try:
            if kind in ("http", "https"):
                match % defaultdict(str)
            elif kind not in ("rule", "is_admin"):
                evaluate: Callable[..., object] = parse("", word)
                evaluate(defaultdict(str), TRIAL_CREDENTIALS, None)
        except Exception as problem:
            raise ValueError(f"{word!r} cannot be evaluated: {problem}") from problem


def references(check: FileCheck) -> list[str]:
    """Return the names of the rules that a check refers to.

    The check ``is_admin`` refers to the rule context_is_admin.
    """
    parts = (word.partition(":") for word in words(check))
    return [
        "context_is_admin" if kind == "is_admin" else name
        for kind, _, name in parts
        if kind in ("rule", "is_admin")
    ]


def cycle(rules: JsonMapping) -> list[str]:
    """Return the names in a cycle of rules that refer to each other, or [] without a cycle.

    The first name is repeated at the end. Only the first cycle is returned.

    Args:
        rules: The check of each rule by name.
    """
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in rules:
            return []
        for part in references(rules[name]):
            if names := walk(part, [*path, name]):
                return names
        done.add(name)
        return []

    for name in rules:
        if names := walk(name, []):
            return names
    return []


@dataclass(frozen=True, slots=True)
class MergedRules:
    """The defaults, overridden by a file.

    Attributes:
        checks: The check of each rule.
        lines: Line of each rule that comes from the file.
        warnings: Texts with file and line about rules without effect, former names, and references
            to missing rules.
    """

    checks: JsonMapping
    lines: Mapping[str, int]
    warnings: Sequence[str]


def merge(path: str, rules: RuleSet) -> MergedRules:
    """Read a policy file, and return the defaults with the file's rules in their place.

    As in oslo.policy, a former name applies to all new names that the file does not contain. A
    former name is ignored if its check is the former default, or only refers to the new name.

    Raises:
        ConfigError: The file is invalid (see ``read``), or rules refer to each other in a cycle.
    """
    file_rules, defaults = read(path), rules.all_defaults
    renamed = {
        name: old
        for name in defaults
        if name not in file_rules
        for old, default in rules.former(name)
        if old in file_rules and file_rules[old].check not in (default, f"rule:{name}")
    }
    sources = {**renamed, **{name: name for name in file_rules}}
    checks = {**defaults, **{name: file_rules[source].check for name, source in sources.items()}}
    if names := cycle(checks):
        line = min(file_rules[sources[name]].line for name in names if name in sources)
        raise ConfigError(f"{path}:{line}: these rules refer to each other: {', '.join(names)}")
    warnings = [
        f"{path}:{line}: {text}"
        for line, text in _find_warnings(file_rules, checks, rules, set(renamed.values()))
    ]
    return MergedRules(
        checks, {name: file_rules[source].line for name, source in sources.items()}, warnings
    )


def _find_warnings(
    file_rules: Mapping[str, FileRule],
    checks: JsonMapping,
    rules: RuleSet,
    applied_names: Collection[str],
) -> Iterator[tuple[int, str]]:
    """Yield line and text for rules without effect, former names, and references to missing rules.

    Args:
        file_rules: The rules of the file.
        checks: The merged checks.
        rules: The rules of the service.
        applied_names: Former names in the file whose checks apply to current names.
    """
    used = {part for check in checks.values() for part in references(check)}
    defaults = rules.all_defaults
    for name, rule in file_rules.items():
        for part in references(rule.check):
            if part not in checks:
                yield (
                    rule.line,
                    f"{name}: there is no rule {part}, so this part never permits{_suggest_name(part, checks)}",
                )
        if name in defaults or name in used:
            continue
        if name in rules.former_names:
            counts = "a former name" if name in applied_names else "a former name and has no effect"
            yield rule.line, f"{name} is {counts}; now: {', '.join(rules.former_names[name][1])}"
        elif name in rules.unsupported:
            yield rule.line, f"{name} has no effect: this cloud has no such operation"
        else:
            yield (
                rule.line,
                f"{name} has no effect: there is no such rule{_suggest_name(name, defaults)}",
            )


def _suggest_name(name: str, names: JsonMapping) -> str:
    matches = difflib.get_close_matches(name, [other for other in names if other != name], 1)
    return f"; did you mean {matches[0]}?" if matches else ""
