"""Write the loss as CSV, for a spreadsheet: ``watch.sinks: [csv]``."""

from collections.abc import Mapping
from typing import Any

from hpcrun.ports import Sink, TrainingStart, numbers


class CsvSink(Sink):
    """Writer of loss.csv in the run directory, with a line for each line of metrics that has a loss."""

    def __init__(self, training: TrainingStart) -> None:
        # Append: an attempt that continues keeps the lines of the earlier attempts.
        self._file = (training.run / "loss.csv").open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Write the step and the loss."""
        metrics = numbers(line)
        if "loss" in metrics:
            self._file.write(f"{line['step']},{metrics['loss']:.6g}\n")

    def flush(self) -> None:
        """Write what Python has buffered."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
