"""Figures with matplotlib: drawn once, and saved as SVG for the report, PNG and PDF."""
