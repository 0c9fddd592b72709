"""What a finished run prints of its report."""

from pathlib import Path

import pytest

from hpcrun.cli.outcome import print_result
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import write_json


def test_numbers_come_first_then_texts_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    report = {"sample": "a\nb", "accuracy": 0.98765, "seen": 270, "confusions": [[10, 0], [2, 8]]}
    early = "at step 70: 5 validations without a better loss; the best was 0.2, at step 20"
    write_json(run.result, {"validation_loss": 0.25, "report": report, "stopped_early": early})
    print_result(run)
    assert capsys.readouterr().out.splitlines() == [
        "  accuracy         0.9877",
        "  seen             270",
        "  validation loss  0.2500",
        f"  stopped early    {early}",
        "  sample:",
        "    | a",
        "    | b",
        "  confusions:",
        "    | 10  0",
        "    |  2  8",
        f"  result           {run.result}",
    ]
