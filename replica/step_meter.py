"""What a step of this engine costs, measured: seconds = a + b * tokens + c * tokens * context.

Weighted least squares over the steps seen, old ones fading. A step's `tokens * context` counts what each token really
attends to (`Chunk.token_context`), prefill and decode alike.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from replica.runner import Chunk
from shared.fleet_records import CostCoefficients

__all__ = ["StepMeter"]

_FADING = 0.998
"""Per step: half of the weight lies on the last 350."""
_MIN_STEPS = 8
_RIDGE = 1e-9


class StepMeter:
    """`observe` each step; `coefficients` is None until steps of different sizes were seen."""

    def __init__(self) -> None:
        # Sums over steps of x_i * x_j and x_i * y, with x = (1, tokens, tokens * context) and y = seconds.
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._steps = 0

    def observe(self, chunks: Items[Chunk], seconds: float) -> None:
        features = (
            1.0,
            float(sum(chunk.end - chunk.start for chunk in chunks)),
            sum(chunk.token_context for chunk in chunks),
        )
        for i, left in enumerate(features):
            self._products[i] = self._products[i] * _FADING + left * seconds
            row = self._squares[i]
            for j, right in enumerate(features):
                row[j] = row[j] * _FADING + left * right
        self._steps += 1

    def coefficients(self) -> CostCoefficients | None:
        weight, tokens, squared = self._squares[0][0], self._squares[0][1], self._squares[1][1]
        if self._steps < _MIN_STEPS or squared * weight - tokens * tokens < 0.01 * tokens * tokens:
            return None
        # No cost is negative: a coefficient that comes out so was noise, and the others are fitted without it.
        used = [0, 1, 2]
        while used:
            solution = self._solve(used)
            worst = min(range(len(used)), key=solution.__getitem__)
            if solution[worst] >= 0:
                break
            del used[worst]
        found = dict(zip(used, solution, strict=True))
        return CostCoefficients(found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0))

    def _solve(self, used: list[int]) -> list[float]:
        """The normal equations for the features `used`, each scaled to one, by Gaussian elimination."""
        scale = [self._squares[i][i] ** 0.5 or 1.0 for i in used]
        rows = [
            [self._squares[i][j] / (scale[n] * scale[m]) + (_RIDGE if i == j else 0.0) for m, j in enumerate(used)]
            + [self._products[i] / scale[n]]
            for n, i in enumerate(used)
        ]
        size = len(rows)
        for n in range(size):
            pivot = rows[n]
            for other in range(size):
                if other != n:
                    factor = rows[other][n] / pivot[n]
                    rows[other] = [a - factor * b for a, b in zip(rows[other], pivot, strict=True)]
        return [rows[n][size] / rows[n][n] / scale[n] for n in range(size)]
