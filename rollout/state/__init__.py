"""What is known of every rollout: the store remembers, the registry decides, the outbox pays, the sweeper forgets."""
