"""Answers that repeat the one before."""

import pickle

import pytest

from tandem.parallel.messages import Answer, ArrayLocation, Fault, repeated, repetition

FIRST = Answer((ArrayLocation(0, "<f4", (2, 3)), None), {4: (5,)}, 0.25, 0.5)


def test_of_an_answer_that_repeats_the_former_only_the_times_are_sent() -> None:
    again = FIRST._replace(excerpt=1e-6, function=3.0)
    data = repeated(again, FIRST)
    assert data is not None
    assert len(data) == 16
    assert repetition(data, FIRST) == again


@pytest.mark.parametrize(
    ("answer", "former"),
    [
        (FIRST, None),
        (FIRST, FIRST._replace(results=None)),
        (FIRST, FIRST._replace(results=(ArrayLocation(0, "<f4", (2, 4)), None))),
        (FIRST, FIRST._replace(shapes={4: (6,)})),
        (FIRST, Fault(None, "x", "y")),
        (Fault(None, "x", "y"), FIRST),
        (Fault(None, "x", "y"), Fault(None, "x", "y")),
    ],
)
def test_any_other_answer_is_sent_whole(
    answer: Answer | Fault, former: Answer | Fault | None
) -> None:
    assert repeated(answer, former) is None
    assert repetition(pickle.dumps(answer), former) is None
