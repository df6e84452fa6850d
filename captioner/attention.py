"""Attention as query, key and value: score functions, weights, weighted sum; self-attention.

Nothing here knows of photos: `keys` and `values` may be regions of a photo or words of a sentence.

Shapes: `B` sources (photos, sentences), `C` queries per source, `L` keys of a source, `Q` query
channels, `D` key channels, `A` attention units.

What depends on the keys alone is separated (`Score.prepare`), because a decoder asks many times
about the same keys: the products with the keys are then made once per source, not once per word.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from captioner.products import Kernel, product, turned

__all__ = [
    "SCORES",
    "AdditiveScore",
    "Attention",
    "CosineScore",
    "DotScore",
    "GeneralScore",
    "Positions",
    "ScaledDotScore",
    "Score",
    "SelfAttention",
    "flat_matmul",
    "weighted_sum",
]


def flat_matmul(x: Any, kernel: Any) -> Any:
    """`x (…, n) @ kernel (n, m)` as one 2-D product.

    TensorFlow multiplies a 3-D tensor with a matrix as a row of small products; on a CPU one large
    product is more than twice as fast (REFERENCE.md, section 8).
    """
    shape = ops.shape(x)
    product = ops.matmul(ops.reshape(x, (-1, shape[-1])), kernel)
    return ops.reshape(product, (*shape[:-1], kernel.shape[-1]))


def weighted_sum(weights: Any, values: Any, transposed: Any = None) -> Any:
    """The third stage: `(B, C, L)` weights of `(B, L, D)` values give contexts `(B, C, D)`.

    Args:
        weights: of every value.
        values: what is summed.
        transposed: `(B, D, L)`, the values again, for the way back: see `captioner.products`.
    """
    return product(ops.cast(weights, values.dtype), Kernel(values, transposed))


class Score(keras.layers.Layer):
    """How well every query fits every key: `score(query, keys)`, the first stage of attention.

    Call arguments:
        query: `(B, C, Q)`.
        keys: `(B, L, D)`.

    Returns:
        Scores `(B, C, L)`, not normalised.

    Sub-classes split the work into `prepare(keys)`, once per source, and `compare(projected,
    prepared)`, once per query. Between them stands the product of the query with `query_kernel`,
    apart because a decoder makes it together with other products.

    Attributes:
        query_kernel: `(Q, A)`; `None`: queries are compared as they are.
    """

    query_kernel: Any = None

    def prepare(self, keys: Any) -> Any:
        raise NotImplementedError

    def compare(self, projected: Any, prepared: Any) -> Any:
        raise NotImplementedError

    def project(self, query: Any) -> Any:
        return query if self.query_kernel is None else flat_matmul(query, self.query_kernel)

    def call(self, query: Any, keys: Any) -> Any:
        return self.compare(self.project(query), self.prepare(keys))

    def get_config(self) -> dict[str, Any]:
        return dict(super().get_config())  # overridden, or Keras wants plain types as arguments

    def compute_output_shape(self, query_shape: Any, keys_shape: Any) -> Any:
        return (*query_shape[:-1], keys_shape[-2])


@keras.saving.register_keras_serializable("captioner")
class AdditiveScore(Score):
    """`u . tanh(W_k key + W_q query + b)`: Bahdanau et al. 2015; f_att of Xu et al. 2015, eq. 4.

    Args:
        units: `A`, width of the hidden layer.
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units

    def build(self, query_shape: Any, keys_shape: Any) -> None:
        self.key_kernel = self.add_weight(shape=(keys_shape[-1], self.units), name="key_kernel")
        self.query_kernel = self.add_weight(
            shape=(query_shape[-1], self.units), name="query_kernel"
        )
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")
        self.vector = self.add_weight(shape=(self.units, 1), name="vector")

    def prepare(self, keys: Any) -> Any:
        return flat_matmul(keys, self.key_kernel) + self.bias  # (B, L, A)

    def compare(self, projected: Any, prepared: Any) -> Any:
        return _additive(prepared, projected, ops.reshape(self.vector, (-1,)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@ops.custom_gradient
def _additive(prepared: Any, projected: Any, vector: Any) -> Any:
    """`tanh(prepared (B, L, A) + projected (B, C, A)) . vector (A,)`: scores `(B, C, L)`."""

    def hidden() -> Any:  # (B, C, L, A)
        return ops.tanh(ops.expand_dims(prepared, 1) + ops.expand_dims(projected, 2))

    def gradient(*arguments: Any, upstream: Any = None) -> Any:
        upstream = arguments[0] if upstream is None else upstream
        # Made again, not kept: kept for every word it would be the most that training remembers.
        # After `upstream`, or TensorFlow would see the same twice and keep it after all.
        with tf.control_dependencies([upstream]):
            again = hidden()
        slope = 1 - again * again
        weighted = ops.matmul(ops.expand_dims(upstream, 2), slope)  # (B, C, 1, A)
        flat = ops.reshape(again, (-1, vector.shape[0]))
        return (
            ops.sum(slope * ops.expand_dims(upstream, -1), axis=1) * vector,
            ops.squeeze(weighted, 2) * vector,
            ops.reshape(ops.matmul(ops.transpose(flat), ops.reshape(upstream, (-1, 1))), (-1,)),
        )

    scores = flat_matmul(hidden(), ops.expand_dims(vector, -1))
    return ops.squeeze(scores, -1), gradient


@keras.saving.register_keras_serializable("captioner")
class DotScore(Score):
    """`query . key` (Luong et al. 2015), after projections where `units` is given.

    Args:
        units: `A`: queries and keys are first projected to this many channels. `None`: no weights;
            queries and keys must then have the same number of channels.
    """

    def __init__(self, units: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units

    def build(self, query_shape: Any, keys_shape: Any) -> None:
        if self.units is None:
            if query_shape[-1] != keys_shape[-1]:
                raise ValueError(
                    f"{type(self).__name__} without units compares channels one by one: query has "
                    f"{query_shape[-1]}, keys have {keys_shape[-1]}; give units to project both"
                )
            return
        self.query_kernel = self.add_weight(
            shape=(query_shape[-1], self.units), name="query_kernel"
        )
        self.key_kernel = self.add_weight(shape=(keys_shape[-1], self.units), name="key_kernel")

    def prepare(self, keys: Any) -> Any:
        return _as_kernel(keys if self.units is None else flat_matmul(keys, self.key_kernel))

    def compare(self, projected: Any, prepared: Any) -> Any:
        return product(projected, prepared)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("captioner")
class ScaledDotScore(DotScore):
    """`query . key / sqrt(A)` (Vaswani et al. 2017, eq. 1): the variance stays that of one channel.

    Args:
        units: as for `DotScore`.
    """

    def compare(self, projected: Any, prepared: Any) -> Any:
        return super().compare(projected, prepared) * (projected.shape[-1] ** -0.5)


@keras.saving.register_keras_serializable("captioner")
class GeneralScore(Score):
    """`query^T W key` (Luong et al. 2015): bilinear; the sizes of query and key may differ."""

    def build(self, query_shape: Any, keys_shape: Any) -> None:
        # Stored (D, Q), the way `prepare` multiplies: the keys' side is the one done once.
        self.kernel = self.add_weight(shape=(keys_shape[-1], query_shape[-1]), name="kernel")

    def prepare(self, keys: Any) -> Any:
        return _as_kernel(flat_matmul(keys, self.kernel))  # of (B, L, Q)

    def compare(self, projected: Any, prepared: Any) -> Any:
        return product(projected, prepared)


@keras.saving.register_keras_serializable("captioner")
class CosineScore(DotScore):
    """`s cos(query, key)`: the angle only (Graves et al. 2014, eq. 6, with key strength `s`).

    A cosine lies in -1..1, which softmax over many keys turns into nearly equal weights; the
    learned strength `s`, which starts at `strength`, makes sharp maps possible.

    Args:
        units: as for `DotScore`.
        strength: first value of `s`.
    """

    def __init__(self, units: int | None = None, strength: float = 10.0, **kwargs: Any) -> None:
        super().__init__(units, **kwargs)
        self.strength = strength

    def build(self, query_shape: Any, keys_shape: Any) -> None:
        super().build(query_shape, keys_shape)
        self.scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(self.strength), name="scale"
        )

    def prepare(self, keys: Any) -> Any:
        keys = keys if self.units is None else flat_matmul(keys, self.key_kernel)
        return _as_kernel(_unit_length(keys))

    def compare(self, projected: Any, prepared: Any) -> Any:
        return self.scale * super().compare(_unit_length(projected), prepared)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "strength": self.strength}


def _as_kernel(keys: Any) -> Kernel:
    """Keys `(B, L, A)` as what queries `(B, C, A)` are multiplied with."""
    return Kernel(turned(keys), keys)  # the gradient is of the first: see `product`


def _unit_length(x: Any) -> Any:
    # A tiny number under the root, not a maximum outside: a zero vector keeps a finite gradient.
    return x * ops.rsqrt(ops.sum(ops.square(x), axis=-1, keepdims=True) + 1e-6)


SCORES: dict[str, type[Score]] = {
    "additive": AdditiveScore,
    "dot": DotScore,
    "scaled-dot": ScaledDotScore,
    "general": GeneralScore,
    "cosine": CosineScore,
}


@keras.saving.register_keras_serializable("captioner")
class Attention(keras.layers.Layer):
    """Soft attention in its three stages: scores, softmax, weighted sum of the values.

    Args:
        score: a name in `SCORES`.
        units: `A`, for the scores that have hidden units; `general` has none.

    Call arguments:
        query: `(B, C, Q)`.
        keys: `(B, L, D)`.
        values: `(B, L, D_v)`; the keys themselves when left out.
        keys_mask: `(B, L)` bool, false where there is no key (the padding of a sentence): weight
            0. Keras passes it along by itself from an `Embedding(mask_zero=True)`.

    Returns:
        `context (B, C, D_v)` and `weights (B, C, L)`, float32, each row summing to 1.

    Example:
        >>> context, weights = Attention("dot", units=None)(query, keys)

    Reference: Xu et al. 2015, eqs. 4-6 and 13.
    """

    def __init__(self, score: str = "additive", units: int | None = 512, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; received {score!r}")
        self.score_name = score
        self.units = units
        arguments = {} if score == "general" else {"units": units}
        self.supports_masking = True
        self.score = SCORES[score](**arguments, name="score", dtype=self.dtype_policy)

    def build(self, query_shape: Any, keys_shape: Any, values_shape: Any = None) -> None:
        self.score.build(query_shape, keys_shape)

    def log_weights(self, projected: Any, prepared: Any, keys_mask: Any = None) -> Any:
        """Scores and softmax: log alpha, `(B, C, L)` float32.

        Args:
            projected: the queries, `self.score.project(query)`.
            prepared: the keys, `self.score.prepare(keys)`.
            keys_mask: as in a call.
        """
        # float32, whatever the policy: in bfloat16 the weights would sum to 1 only within 1 %.
        # The logarithm, because hard attention needs it: log(softmax) would be -inf for weight 0.
        scores = ops.cast(self.score.compare(projected, prepared), "float32")
        if keys_mask is not None:
            scores = ops.where(keys_mask[:, None], scores, -1e9)
        return ops.log_softmax(scores, axis=-1)

    def call(
        self, query: Any, keys: Any, values: Any = None, keys_mask: Any = None
    ) -> tuple[Any, Any]:
        projected, prepared = self.score.project(query), self.score.prepare(keys)
        weights = ops.exp(self.log_weights(projected, prepared, keys_mask))
        return weighted_sum(weights, keys if values is None else values), weights

    def compute_mask(self, *inputs: Any, **masks: Any) -> None:
        """The context has no padding."""

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "score": self.score_name, "units": self.units}


@keras.saving.register_keras_serializable("captioner")
class Positions(keras.layers.Layer):
    """Adds to every key a learned vector for where it stands along each axis of a grid.

    Attention itself does not know where a key stands (Vaswani et al. 2017, section 3.5): it can
    tell what two keys are, but not which of them is to the left. One vector per row and one per
    column, rather than one per cell, let what is learned at one height hold at every other.

    Args:
        grid: how many keys there are along each axis; `L` is their product, the last axis varies
            first. A sentence has one axis.

    Call arguments:
        values: `(B, L, D)`.
    """

    def __init__(self, grid: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.grid = tuple(grid)

    def build(self, values_shape: Any) -> None:
        # Half as large as the channels of a normalised region: heard from the first step.
        first = keras.initializers.RandomNormal(stddev=0.5)
        self.axes = [
            self.add_weight(
                shape=(length, values_shape[-1]), initializer=first, name=f"axis_{number}"
            )
            for number, length in enumerate(self.grid)
        ]

    def call(self, values: Any) -> Any:
        vectors = 0.0
        for number, axis in enumerate(self.axes):
            shape = [1] * len(self.grid)
            shape[number] = self.grid[number]
            vectors += ops.reshape(axis, (*shape, -1))
        return values + ops.reshape(vectors, (-1, values.shape[-1]))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "grid": list(self.grid)}


class _OneRow(keras.layers.MultiHeadAttention):
    """Multi-head attention whose sources `(B, L, D)` come in one row `(1, B * L, D)`.

    Keras projects a 3-D tensor by `B` small products, and makes as many gradients of each kernel;
    in one row they are one product (on a CPU three times as fast).
    """

    def attend(self, values: Any, training: bool) -> tuple[Any, Any]:
        shape = ops.shape(values)
        self._sources = shape[:2]
        row = ops.reshape(values, (1, -1, shape[-1]))
        mixed, scores = self(row, row, training=training, return_attention_scores=True)
        return ops.reshape(mixed, shape), scores

    def _compute_attention(
        self, query: Any, key: Any, value: Any, *args: Any, **options: Any
    ) -> Any:
        """What Keras leaves to sub-classes: the attention proper, `(…, L, heads, units)`."""
        query, key, value = (
            ops.reshape(part, (*self._sources, *part.shape[2:])) for part in (query, key, value)
        )
        mixed, scores = super()._compute_attention(query, key, value, *args, **options)
        return ops.reshape(mixed, (1, -1, *mixed.shape[2:])), scores


@keras.saving.register_keras_serializable("captioner")
class SelfAttention(keras.layers.Layer):
    """Query, key and value from the same source: every region looks at every region.

    One pre-norm residual layer: `x + MultiHead(LayerNorm(x))` (Vaswani et al. 2017, section 3.2.2;
    pre-norm: Xiong et al. 2020).

    Args:
        heads: attention heads.
        head_units: channels of a head.
        dropout: share of attention weights dropped while training.

    Call arguments:
        values: `(B, L, D)`.
        training: whether dropout is on.
        return_scores: return the weights as well.

    Returns:
        `(B, L, D)`; with `return_scores` also the weights `(B, heads, L, L)`: row `i` of a map is
        where region `i` looked, summing to 1.
    """

    def __init__(
        self, heads: int = 8, head_units: int = 64, dropout: float = 0.1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.heads = heads
        self.head_units = head_units
        self.dropout = dropout
        dtype = self.dtype_policy
        self.normalise = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype)
        self.attention = _OneRow(
            heads,
            head_units,
            dropout=dropout,
            flash_attention=False,  # it cannot return the weights
            dtype=dtype,
            name="multi_head_attention",
        )

    def build(self, values_shape: Any) -> None:
        self.normalise.build(values_shape)
        self.attention.build(values_shape, values_shape)

    def call(self, values: Any, training: bool = False, return_scores: bool = False) -> Any:
        normal = self.normalise(values)
        mixed, scores = self.attention.attend(normal, training)
        values = values + mixed
        return (values, scores) if return_scores else values

    def compute_output_shape(self, values_shape: Any) -> Any:
        return values_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "heads": self.heads,
            "head_units": self.head_units,
            "dropout": self.dropout,
        }
