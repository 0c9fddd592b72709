"""Names that a copy of ``examples/bdh.py`` from before 0.1.0 imports: a run continues with its copy."""

from hpcrun.config.tasks.language_model import BYTES, LanguageModelShape, splits_over_heads

__all__ = ["BYTES", "LanguageModelShape", "splits_over_heads"]
