"""What runs inside or beside a rank besides the training: clock, sentry, stacks, addresses."""
