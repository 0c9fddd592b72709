"""Measures collectives under candidate settings, and keeps the default unless a setting is better."""
