"""All outcomes of a random procedure with their probabilities: the code under test runs once for each."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Script:
    """A chance that decides as told, then takes the first possibility, and remembers what else there was."""

    def __init__(self, choices: list[int]) -> None:
        self.choices = choices
        self.taken: list[int] = []
        self.possible: list[list[int]] = []
        self.probability = 1.0

    def accept(self, probability: float) -> bool:
        return self._choose({1: probability, 0: 1.0 - probability}) == 1

    def draw(self, weights_V: Tensor) -> int:
        total = float(weights_V.sum())
        return self._choose({i: w / total for i, w in enumerate(weights_V.tolist())})

    def _choose(self, probabilities: dict[int, float]) -> int:
        possible = [choice for choice, probability in probabilities.items() if probability > 0]
        choice = self.choices[len(self.taken)] if len(self.taken) < len(self.choices) else possible[0]
        self.taken.append(choice)
        self.possible.append(possible)
        self.probability *= probabilities[choice]
        return choice


def outcomes(run: Callable[[Script], T]) -> Iterator[tuple[float, T]]:
    """Probability and result of every way `run` can go."""
    waiting: list[list[int]] = [[]]
    while waiting:
        known = waiting.pop()
        script = Script(known)
        result = run(script)
        for i in range(len(known), len(script.taken)):
            waiting += [[*script.taken[:i], other] for other in script.possible[i] if other != script.taken[i]]
        yield script.probability, result
