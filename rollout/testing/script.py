"""Who answers which request: the rules a test gives a mock trainer, and how one of them is picked."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, cast

from rollout.testing.faults import Answer, Reply, raw, status, text
from rollout.testing.peer import RecordedRequest
from rollout.wire import encode_strict

AnswerLike: TypeAlias = Answer | str | bytes | int | Mapping[str, Any] | None
"""An answer, or short for one: text the model says, bytes as they are, a status, a JSON body, None for the default."""
AnswerMaker: TypeAlias = Callable[[RecordedRequest], AnswerLike | Awaitable[AnswerLike]]
Answers: TypeAlias = AnswerLike | AnswerMaker | Sequence[AnswerLike | AnswerMaker]


def as_answer(given: AnswerLike, default: Reply) -> Answer:
    """The answer that the short form stands for; `TypeError` if it stands for none."""
    if given is None:
        return default
    if isinstance(given, Answer):
        return given
    if isinstance(given, str):
        return text(given)
    if isinstance(given, bytes):
        return raw(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return status(given)
    if isinstance(given, Mapping):
        return Reply(encode_strict(given))
    raise TypeError(f"{given!r} is not an answer: give an Answer, str, bytes, int, dict or None")


class RuleOptions(TypedDict, total=False):
    """Which requests a rule is for, and how often it is used."""

    rollout_id: str | None
    when: Callable[[RecordedRequest], bool] | None
    times: int | None
    each_rollout: bool


@dataclasses.dataclass(eq=False)
class Rule:
    """The answers for some requests, one after the other; the last one repeats, at most until `times` are given."""

    endpoint: str
    answers: Sequence[AnswerLike | AnswerMaker]
    rollout_id: str | None = None
    when: Callable[[RecordedRequest], bool] | None = None
    times: int | None = None
    each_rollout: bool = False
    """Every rollout gets the list (and the `times`) for itself."""
    used: Counter[str | None] = dataclasses.field(default_factory=Counter)

    @property
    def rank(self) -> tuple[bool, bool]:
        """What is asked for by name goes before what is for all; what runs out goes before what does not."""
        return (self.rollout_id is None and self.when is None, self.times is None)

    def replaces(self, other: Rule) -> bool:
        """Whether the other could never be used again beside this one."""
        return (self.endpoint, self.rollout_id, self.when, self.times, other.times) == (
            other.endpoint,
            other.rollout_id,
            other.when,
            None,
            None,
        )

    def takes(self, request: RecordedRequest, endpoints: tuple[str, ...]) -> bool:
        """Whether the rule has an answer for this request."""
        return (
            self.endpoint in endpoints
            and (self.rollout_id is None or self.rollout_id == request.rollout_id)
            and (self.times is None or self.used[self._turn_of(request)] < self.times)
            and (self.when is None or self.when(request))
        )

    def next_answer(self, request: RecordedRequest) -> AnswerLike | AnswerMaker:
        """The answer whose turn it is; counts it as given."""
        turn = self._turn_of(request)
        position = self.used[turn]
        self.used[turn] += 1
        return self.answers[min(position, len(self.answers) - 1)]

    def _turn_of(self, request: RecordedRequest) -> str | None:
        return request.rollout_id if self.each_rollout else None


def _listed(answers: Answers) -> Sequence[AnswerLike | AnswerMaker]:
    if isinstance(answers, (list, tuple)):
        return answers
    return [cast("AnswerLike | AnswerMaker", answers)]


class Script:
    """The rules of one trainer. No await between picking and counting, so concurrent requests get different answers."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def add(self, endpoint: str, answers: Answers, **options: Unpack[RuleOptions]) -> None:
        """Add a rule for an endpoint or an exact path; `ValueError` and `TypeError` for what can never be an answer."""
        listed = _listed(answers)
        if not listed:
            raise ValueError("a script needs at least one answer")
        rule = Rule(endpoint, listed, **options)
        for answer in listed:
            if not callable(answer):
                as_answer(answer, Reply())  # a mistake shows where it is made
        kept = [other for other in self._rules if not rule.replaces(other)]
        self._rules = sorted([*kept, rule], key=lambda each: each.rank)

    async def answer(self, request: RecordedRequest, endpoints: tuple[str, ...], default: Reply) -> Answer:
        """What the first rule that takes the request says, else the default."""
        for rule in self._rules:
            if rule.takes(request, endpoints):
                given = rule.next_answer(request)
                if callable(given):
                    made = given(request)
                    given = await made if inspect.isawaitable(made) else made
                return as_answer(given, default)
        return default
