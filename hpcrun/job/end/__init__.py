"""The end of an attempt: its evidence, its cause, and the decision about another attempt."""
