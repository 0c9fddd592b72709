"""Staying alive: signals, agreement between ranks, deadlines, causes, budgets, requeue."""
