"""Figures and the report of many runs: PNG, PDF and one HTML file."""
