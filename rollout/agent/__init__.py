"""What a user writes, and what runs it: agent loops, their tools, and the context of one rollout."""
