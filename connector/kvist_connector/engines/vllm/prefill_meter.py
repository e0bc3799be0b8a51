"""How fast this engine prefills, measured on its own steps. Torch-free, no I/O.

    seconds of a step = a * tokens + b * sum(end^2 - start^2)       (planner.PrefillModel)

Least squares over steps with weights that fade, so a change of load or clock is followed.
Called by the scheduler half with every step that computed prompt tokens and loaded nothing.
"""

from __future__ import annotations

from kvist_connector.planner import PrefillModel

MIN_STEP_TOKENS = 64  # below this a step's fixed cost hides the tokens' own
FADE = 0.98
WARM_UP = 2  # steps not counted
SETTLED = 8  # steps after which a single slow one (a pause of the machine) is cut to
OUTLIER = 3.0  # times what was expected


class PrefillMeter:
    """Fading sums of the 2x2 normal equations."""

    def __init__(self) -> None:
        self._tt = self._tq = self._qq = self._ts = self._qs = 0.0
        self.steps = 0

    def observe(self, spans: list[tuple[int, int]], seconds: float) -> None:
        """`spans`: computed token ranges (start, end) of every request in the step."""
        tokens = float(sum(end - start for start, end in spans))
        squares = float(sum(end * end - start * start for start, end in spans))
        if tokens < MIN_STEP_TOKENS or seconds <= 0:
            return
        self.steps += 1
        if self.steps <= WARM_UP:
            return  # the first steps allocate and compile
        expected = self._expected(tokens, squares)
        if expected is not None and self.steps > WARM_UP + SETTLED:
            seconds = min(seconds, OUTLIER * expected)
        self._tt = FADE * self._tt + tokens * tokens
        self._tq = FADE * self._tq + tokens * squares
        self._qq = FADE * self._qq + squares * squares
        self._ts = FADE * self._ts + tokens * seconds
        self._qs = FADE * self._qs + squares * seconds

    def model(self) -> PrefillModel | None:
        """None until something was measured; both terms are at least zero."""
        if self._tt == 0.0:
            return None
        determinant = self._tt * self._qq - self._tq * self._tq
        if determinant > 1e-6 * self._tt * self._qq:
            linear = (self._ts * self._qq - self._qs * self._tq) / determinant
            quadratic = (self._qs * self._tt - self._ts * self._tq) / determinant
            if linear > 0 and quadratic >= 0:
                return PrefillModel(linear, quadratic)
        return PrefillModel(self._ts / self._tt)

    def _expected(self, tokens: float, squares: float) -> float | None:
        model = self.model()
        return model.linear * tokens + model.quadratic * squares if model is not None else None
