"""The benchmark of programs at its own sizes: their answers, but no times."""

import numpy as np
import pytensor
import pytest
from pytensor.compile.mode import Mode

from benchmarks.programs import Program, programs
from tandem.backend import device_mode

PROGRAMS = {program.name: program for program in programs()}


def test_there_are_those_that_a_reader_expects() -> None:
    assert len(PROGRAMS) >= 12
    assert {"RNN, 100 steps of 32 units", "hierarchical regression (radon)"} <= {*PROGRAMS}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_has_equal_results_in_both_modes(program: Program) -> None:
    results = []
    for mode in (device_mode("cpu", regions=True), Mode(linker="py")):
        function = pytensor.function(program.inputs, program.outputs, mode=mode)
        found = function(*program.values)
        results.append(found if isinstance(found, list) else [found])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
