"""The report of many runs as one interactive page, and plots in the terminal.

docs/report.md describes the commands `hpcrun plot` and `hpcrun report`.
"""
