"""The runs of a sweep as rows of values: axes, sweep files, conditions, placeholders."""
