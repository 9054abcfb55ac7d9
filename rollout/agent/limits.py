"""The budgets of one rollout: LLM calls and tokens."""

from __future__ import annotations

from rollout.errors import TokenLimitReached, TurnLimitReached


class Limits:
    """Counts what one rollout has used. Not thread-safe: one rollout, one task.

    Tokens are those of the conversation: the largest prompt + completion of one call, or the first prompt and all
    completions since, whichever is more. A prompt that is sent again in the next turn is not counted again.
    """

    __slots__ = ("_first_prompt", "_responses", "context_tokens", "max_tokens_total", "max_turns", "turns")

    def __init__(self, max_turns: int, max_tokens_total: int) -> None:
        self.max_turns = max_turns
        self.max_tokens_total = max_tokens_total
        self.turns = 0
        self.context_tokens = 0
        self._first_prompt: int | None = None
        self._responses = 0

    @property
    def remaining_turns(self) -> int:
        """LLM calls that may still be made."""
        return max(0, self.max_turns - self.turns)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that the conversation may still grow by, as far as the trainer's `usage` told."""
        return max(0, self.max_tokens_total - self.context_tokens)

    def check(self) -> None:
        """Raise `TurnLimitReached` or `TokenLimitReached` if no further call may be made."""
        if self.turns >= self.max_turns:
            raise TurnLimitReached(f"the limit of {self.max_turns} turns is reached")
        if self.context_tokens >= self.max_tokens_total:
            raise TokenLimitReached(f"the conversation holds {self.context_tokens} of {self.max_tokens_total} tokens")

    def count(self, prompt_tokens: int, response_tokens: int) -> None:
        """One answer has come."""
        if self._first_prompt is None:
            self._first_prompt = prompt_tokens
        self._responses += response_tokens
        self.context_tokens = max(
            self.context_tokens, prompt_tokens + response_tokens, self._first_prompt + self._responses
        )
