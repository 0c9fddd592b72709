"""``tools/gpu_faults``: the planted faults still fit the code."""

import ast
from pathlib import Path

import pytest

from tools.gpu_faults.__main__ import planted
from tools.gpu_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_code_and_has_tests(fault: Fault) -> None:
    text = (ROOT / "hpcrun" / fault.file).read_text()
    changed = planted(text, fault)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert (ROOT / fault.tests[0]).exists()


def test_a_fault_that_no_longer_fits_is_refused() -> None:
    fault = FAULTS[0]
    with pytest.raises(ValueError, match="occurs 0 times, not once"):
        planted("", fault)
