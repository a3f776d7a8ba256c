"""Programs made of programs."""

from collections.abc import Generator, Sequence
from typing import Any

Program = Generator[Any, Any, Any]


def together(programs: Sequence[Program]) -> Generator[Any, Any, list[Any]]:
    """Run several programs side by side: what they ask for at the same time is asked as one list.

    The paths of what they ask must differ. An error in one is raised when all that was asked with it is
    there.
    """
    try:
        return (yield from _side_by_side(programs))
    finally:
        for program in programs:
            program.close()


def _side_by_side(programs: Sequence[Program]) -> Generator[Any, Any, list[Any]]:
    results: list[Any] = [None] * len(programs)
    asks: dict[int, Any] = {}
    for i, program in enumerate(programs):
        _go_on(i, program, None, asks, results)
    while asks:
        flat: list[Any] = []
        shape: list[tuple[int, int, bool]] = []
        for i, asked in asks.items():
            plural = isinstance(asked, list | tuple)
            many = list(asked) if plural else [asked]
            shape.append((i, len(many), plural))
            flat += many
        answers = yield flat
        at, asks = 0, {}
        for i, count, plural in shape:
            answer = answers[at : at + count] if plural else answers[at]
            at += count
            _go_on(i, programs[i], answer, asks, results)
    return results


def _go_on(i: int, program: Program, answer: Any, asks: dict[int, Any], results: list[Any]) -> None:
    try:
        asks[i] = program.send(answer)
    except StopIteration as end:
        results[i] = end.value
