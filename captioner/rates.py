"""Optimizers with a lower learning rate for some variables: for an encoder that knows already."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

__all__ = ["OPTIMIZERS", "AdamW", "PaperRMSprop", "build_optimizer"]


class _TwoRates(keras.optimizers.Optimizer):
    """Variables given to `slow_down` move more slowly. For optimizers that compute a step from a
    variable's own gradients alone."""

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

    def _clip_gradients(self, gradients: list[Any]) -> list[Any]:
        # Keras clips the gradient of every replica and then sums them; here it is the sum that is
        # clipped, as if one device had computed it.
        # Dense, because the norm of an embedding's gradient is not that of its rows where a word
        # occurs more than once.
        dense = [tf.convert_to_tensor(one) for one in gradients]
        return cast(list[Any], super()._clip_gradients(self._sum_over_replicas(dense)))

    def _sum_over_replicas(self, gradients: list[Any]) -> list[Any]:
        context = tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return gradients
        return list(context.all_reduce(tf.distribute.ReduceOp.SUM, gradients))

    def _all_reduce_sum_gradients(self, pairs: list[Any]) -> list[Any]:
        return pairs  # done in `_clip_gradients`

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        factor = self._factor_of[self._get_variable_index(variable)]
        self._step(gradient, variable, learning_rate * factor)

    def _step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)


class AdamW(_TwoRates, keras.optimizers.AdamW):
    """Loshchilov and Hutter 2019; Keras' AdamW, with TensorFlow's own kernel for the step."""

    def _step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        # The formula of Keras, in one pass over the weights, where its ten operations make ten.
        place, kind = self._get_variable_index(variable), variable.dtype
        step = tf.cast(self.iterations + 1, kind)
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[place].value.handle,
            v=self._velocities[place].value.handle,
            beta1_power=self.beta_1**step,
            beta2_power=self.beta_2**step,
            lr=tf.cast(learning_rate, kind),
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=self.epsilon,
            grad=tf.cast(gradient, kind),
        )


class PaperRMSprop(_TwoRates, keras.optimizers.RMSprop):
    """RMSProp as Xu et al. 2015 trained Flickr8k with it (section 4.3): the form of Graves 2013,
    eqs. 38 to 41, with the constants of `optimizers.py` in kelvinxu/arctic-captions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        constants = {"rho": 0.95, "momentum": 0.9, "epsilon": 1e-4, "centered": True}
        super().__init__(*args, **{**constants, **kwargs})


OPTIMIZERS = {"adamw": AdamW, "rmsprop": PaperRMSprop}


def build_optimizer(name: str, learning_rate: Any, weight_decay: float, clip: float) -> Any:
    """An optimizer of `OPTIMIZERS`.

    Args:
        name: its name there.
        learning_rate: a number or a schedule.
        weight_decay: share of a weight that decays, times the learning rate, at every step.
        clip: largest norm of the gradient of all variables together.
    """
    return OPTIMIZERS[name](learning_rate, weight_decay=weight_decay or None, global_clipnorm=clip)
