"""Figures and the report of many runs: terminal plots, PNG, PDF and one HTML file.

docs/report.md describes the commands `hpcrun plot` and `hpcrun report`.
"""
