"""What a prefill costs, in seconds: a + b*u + c*u*L, u uncached of L prompt tokens; and what host memory costs.

The coefficients are those the replica publishes (measured by its engine); else those learned here, per class of
replica, from the times to first token that this router has seen; else a cautious default. Learning is recursive least
squares with forgetting: a sample far outside the usual error counts for little (Huber's weights), coefficients in use
are never negative, and uncertainty never grows past where it began.
"""

from __future__ import annotations

from shared.fleet_state import CostCoefficients

__all__ = ["DEFAULT_COST", "CostModel", "onload_seconds", "service_seconds"]

DEFAULT_COST = CostCoefficients(base_seconds=0.01, per_token_seconds=2e-4, per_token_context_seconds=1e-8)

_ONLOAD_SHARE = 0.1
_MAX_CLASSES = 256
_FORGETTING = 0.99
# Features are scaled so that each coefficient is seconds: per request, per 1,000 tokens, per 1,000 x 1,000.
_TOKEN_SCALE = 1e3
_CONTEXT_SCALE = 1e6
_MIN_PER_TOKEN = 1e-7
# How loosely the default is held, in units of one sample's weight.
_PRIOR_VARIANCE = (1.0, 10.0, 1.0)
_LEAST_SECONDS = 1e-3
_LEAST_NOISE = 0.02
_OUTLIER_SIGMAS = 2.0
_NOISE_LEARNING = 0.1

Vector = tuple[float, float, float]


def service_seconds(cost: CostCoefficients, uncached_tokens: int, prompt_tokens: int) -> float:
    return (
        cost.base_seconds
        + cost.per_token_seconds * uncached_tokens
        + cost.per_token_context_seconds * uncached_tokens * prompt_tokens
    )


def onload_seconds(cost: CostCoefficients, measured_per_token: float | None, tokens: int) -> float:
    """To bring the KV of so many tokens back from host memory; as long as not measured, a share of computing it."""
    if measured_per_token is None:
        return _ONLOAD_SHARE * cost.per_token_seconds * tokens
    return measured_per_token * tokens


class CostModel:
    """Coefficients per class of replica. At most `_MAX_CLASSES` are learned; more use the default."""

    def __init__(self, default: CostCoefficients = DEFAULT_COST) -> None:
        self._default = default
        self._learned: dict[str, _Regression] = {}

    def coefficients(self, replica_class: str) -> CostCoefficients:
        """For a replica that publishes none."""
        regression = self._learned.get(replica_class)
        return regression.coefficients if regression is not None else self._default

    def observe(self, replica_class: str, uncached_tokens: int, prompt_tokens: int, seconds: float) -> None:
        """A prefill of that size took `seconds` from its start to its first token."""
        regression = self._learned.get(replica_class)
        if regression is None:
            if len(self._learned) >= _MAX_CLASSES:
                return
            regression = self._learned[replica_class] = _Regression(self._default)
        features = (1.0, uncached_tokens / _TOKEN_SCALE, uncached_tokens * prompt_tokens / _CONTEXT_SCALE)
        regression.observe(features, seconds)


class _Regression:
    """Recursive least squares over three features, from a prior."""

    def __init__(self, prior: CostCoefficients) -> None:
        self.coefficients = prior
        self._weights: Vector = (
            prior.base_seconds,
            prior.per_token_seconds * _TOKEN_SCALE,
            prior.per_token_context_seconds * _CONTEXT_SCALE,
        )
        v0, v1, v2 = _PRIOR_VARIANCE
        self._covariance: list[list[float]] = [[v0, 0.0, 0.0], [0.0, v1, 0.0], [0.0, 0.0, v2]]
        self._noise: float | None = None

    def observe(self, features: Vector, seconds: float) -> None:
        # Divided by the seconds seen, every sample is one of relative error: long and short prompts count alike, and a
        # stall of any length is wrong by one at most.
        scale = 1.0 / max(_LEAST_SECONDS, seconds)
        scaled = (features[0] * scale, features[1] * scale, features[2] * scale)
        error = seconds * scale - _dot(self._weights, scaled)
        size = abs(error)
        if self._noise is None:
            self._noise = max(_LEAST_NOISE, size)
        trusted = _OUTLIER_SIGMAS * self._noise
        doubt = size / trusted if size > trusted else 1.0
        self._noise = max(_LEAST_NOISE, self._noise + _NOISE_LEARNING * (min(size, trusted) - self._noise))

        spread = [_dot(row, scaled) for row in self._covariance]
        denominator = _FORGETTING * doubt + _dot(spread, scaled)
        gain = [value / denominator for value in spread]
        w0, w1, w2 = self._weights
        self._weights = (w0 + gain[0] * error, w1 + gain[1] * error, w2 + gain[2] * error)
        self._covariance = [
            [(self._covariance[i][j] - gain[i] * spread[j]) / _FORGETTING for j in range(3)] for i in range(3)
        ]
        self._bound_covariance()
        a, b, c = self._weights
        self.coefficients = CostCoefficients(
            base_seconds=max(0.0, a),
            per_token_seconds=max(_MIN_PER_TOKEN, b / _TOKEN_SCALE),
            per_token_context_seconds=max(0.0, c / _CONTEXT_SCALE),
        )

    def _bound_covariance(self) -> None:
        # Forgetting blows up what is never excited (always the same prompt length); scaling row and column keeps the
        # matrix a covariance.
        for i, limit in enumerate(_PRIOR_VARIANCE):
            if self._covariance[i][i] > limit:
                scale = (limit / self._covariance[i][i]) ** 0.5
                for j in range(3):
                    self._covariance[i][j] *= scale
                    self._covariance[j][i] *= scale


def _dot(left: Vector | list[float], right: Vector) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2]
