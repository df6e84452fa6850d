"""AdamW with a lower learning rate for some of the variables: for an encoder that knows already."""

from collections.abc import Sequence
from typing import Any

import keras

__all__ = ["TwoRates"]


class TwoRates(keras.optimizers.AdamW):
    """AdamW (Loshchilov and Hutter 2019); variables given to `slow_down` move more slowly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._factors: dict[str, float] = {}

    def slow_down(self, variables: Sequence[Any], factor: float) -> None:
        """Multiplies the learning rate of these variables; they do not decay any more."""
        self._factors = {variable.path: factor for variable in variables}
        self.exclude_from_weight_decay(var_list=list(variables))

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)
        self._factor_of = [self._factors.get(variable.path, 1.0) for variable in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        factor = self._factor_of[self._get_variable_index(variable)]
        super().update_step(gradient, variable, learning_rate * factor)
