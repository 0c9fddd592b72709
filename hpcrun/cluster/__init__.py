"""The environment of this process: ranks, hosts, ports and remaining time, read from its launcher.

A base package: it imports nothing of hpcrun but the error classes, and never torch.
"""
