"""The recurrent decoder of *Show, Attend and Tell*: initial state, step, word head.

Reference: Xu et al. 2015, sections 3.1.2 and 4.2.1, and the authors' kelvinxu/arctic-captions.

Shapes: `B` photos, `C` captions per photo, `T` words, `L` regions, `D` region channels, `H` units,
`A` attention units, `E` embedding units, `V` vocabulary. Captions of a photo share its regions and
keys; inside, `N = B * C` captions stand in one row so that every product is a 2-D one.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from captioner.attention import SCORES, Attention

__all__ = ["ATTENTIONS", "Decoder", "DecoderState", "Memory", "StepOutput"]

ATTENTIONS = ("soft", "none")


class Memory(NamedTuple):
    """What depends on the photo alone, computed once per photo.

    Attributes:
        regions: `(B, L, D)`, a_1..a_L of the paper.
        keys: `(B, L, A)`, the regions prepared for the score function; the mean region
            `(B, 1, D)` for a decoder without attention.
    """

    regions: Any
    keys: Any


class DecoderState(NamedTuple):
    """All that changes from word to word.

    Attributes:
        hidden: `(B * C, H)`, h_t.
        cell: `(B * C, H)`, c_t.
    """

    hidden: Any
    cell: Any


class StepOutput(NamedTuple):
    """What one word step gives.

    Attributes:
        logits: `(B, C, V)`, scores of the next word.
        state: the next `DecoderState`.
        attention: `(B, C, L)`, alpha_t, float32; `None` without attention.
        gate: `(B, C)`, beta_t, float32; `None` without attention.
    """

    logits: Any
    state: DecoderState
    attention: Any
    gate: Any


@keras.saving.register_keras_serializable("captioner")
class Decoder(keras.layers.Layer):
    """Writes captions over regions, one word at a time.

    Called with whole captions it is teacher forced; `begin` and `step` write freely. Both run the
    same recurrence (`_advance`) and the same word head (`_logits`).

    Args:
        vocabulary_size: `V`.
        units: `H`, LSTM units.
        attention_units: `A`, hidden units of the score function.
        embedding_units: `E`.
        attention: `soft`, or `none`: the mean region is the context of every word.
        score: score function of the attention, a name in `captioner.attention.SCORES`.
        dropout: share of units dropped while training: of the embeddings, of the mean region
            before the initial state, of h before the word head, and after the head's tanh.

    Call arguments:
        regions: `(B, L, D)`.
        tokens: `(B, C, T)` int, previous words: `<start>` first; pads may follow the end.

    Returns:
        A dict: `logits (B, C, T, V)`, and unless attention is `none`, `attention (B, C, T, L)`
        and `gate (B, C, T)`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        units: int = 512,
        attention_units: int = 512,
        embedding_units: int = 512,
        attention: str = "soft",
        score: str = "additive",
        dropout: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}: {attention!r}")
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}: {score!r}")
        self.vocabulary_size = vocabulary_size
        self.units = units
        self.attention_units = attention_units
        self.embedding_units = embedding_units
        self.attention_kind = attention
        self.score = score
        self.dropout = dropout

        layers, dtype = keras.layers, self.dtype_policy
        self.embedding = layers.Embedding(
            vocabulary_size, embedding_units, dtype=dtype, name="embedding"
        )
        self.initial_hidden = layers.Dense(units, "tanh", dtype=dtype, name="initial_hidden")
        self.initial_cell = layers.Dense(units, "tanh", dtype=dtype, name="initial_cell")
        self.attention: Any = None
        self.gate: Any = None
        if attention != "none":
            self.attention = Attention(score, attention_units, dtype=dtype, name="attention")
            self.gate = layers.Dense(1, "sigmoid", dtype=dtype, name="gate")
        self.head_hidden = layers.Dense(embedding_units, dtype=dtype, name="head_hidden")
        self.head_context = layers.Dense(
            embedding_units, use_bias=False, dtype=dtype, name="head_context"
        )
        self.head_words = layers.Dense(vocabulary_size, dtype=dtype, name="head_words")
        self.drop_embedding = layers.Dropout(dropout, dtype=dtype)
        self.drop_mean = layers.Dropout(dropout, dtype=dtype)
        self.drop_hidden = layers.Dropout(dropout, dtype=dtype)
        self.drop_head = layers.Dropout(dropout, dtype=dtype)

    def build(self, regions_shape: Any, tokens_shape: Any = None) -> None:
        depth, units = regions_shape[-1], self.units
        self.embedding.build((None, None))
        self.initial_hidden.build((None, depth))
        self.initial_cell.build((None, depth))
        if self.attention is not None:
            self.attention.build((None, None, units), (None, None, depth))
            self.gate.build((None, units))
        self.head_hidden.build((None, units))
        self.head_context.build((None, depth))
        self.head_words.build((None, self.embedding_units))
        # The LSTM's kernel is in two parts: that of the words is applied to all steps at once,
        # before the loop; only context and recurrence have to wait for the step before.
        self.word_kernel = self.add_weight(
            shape=(self.embedding_units, 4 * units), name="word_kernel"
        )
        self.context_kernel = self.add_weight(shape=(depth, 4 * units), name="context_kernel")
        self.recurrent_kernel = self.add_weight(
            shape=(units, 4 * units), initializer="orthogonal", name="recurrent_kernel"
        )
        # A forget gate that starts open (Jozefowicz et al. 2015) lets gradients reach the start.
        self.lstm_bias = self.add_weight(
            shape=(4 * units,), initializer=_forget_gate_open, name="lstm_bias"
        )

    def begin(
        self, regions: Any, captions: int = 1, training: bool = False
    ) -> tuple[Memory, DecoderState]:
        """What the photo alone decides: keys and the initial state (init-MLPs of section 3.1.2).

        Args:
            regions: `(B, L, D)`.
            captions: `C`, captions to be written per photo.
            training: whether dropout is on.
        """
        mean = ops.mean(regions, axis=1)  # (B, D)
        if self.attention is None:
            memory = Memory(regions, mean[:, None])
        else:
            memory = Memory(regions, self.attention.score.prepare(regions))
        mean = self.drop_mean(mean, training=training)
        hidden, cell = self.initial_hidden(mean), self.initial_cell(mean)
        return memory, DecoderState(
            ops.repeat(hidden, captions, axis=0), ops.repeat(cell, captions, axis=0)
        )

    def step(self, tokens: Any, state: DecoderState, memory: Memory) -> StepOutput:
        """One word further, for search.

        Args:
            tokens: `(B, C)` int, the previous words.
            state: from `begin` or the step before.
            memory: from `begin`.
        """
        shape = ops.shape(tokens)
        embedded = self.embedding(ops.reshape(tokens, (-1,)))  # (N, E)
        state, context, attention, gate = self._advance(
            ops.matmul(embedded, self.word_kernel), state, memory
        )
        logits = self._logits(embedded, state.hidden, context)
        return StepOutput(
            ops.reshape(logits, (*shape, self.vocabulary_size)), state, attention, gate
        )

    def call(self, regions: Any, tokens: Any, training: bool = False) -> dict[str, Any]:
        regions = ops.cast(regions, self.compute_dtype)
        photos, captions, length = ops.shape(tokens)
        # An unrolled loop needs to know how often: Captioner.make_train_function sees to that.
        if not isinstance(length, int):
            raise ValueError("the number of words must be known: give tokens a static shape")
        memory, state = self.begin(regions, captions, training)
        embedded = self.embedding(ops.reshape(tokens, (-1, length)))  # (N, T, E)
        embedded = self.drop_embedding(embedded, training=training)
        words = ops.reshape(embedded, (-1, self.embedding_units))
        projected = ops.reshape(ops.matmul(words, self.word_kernel), (-1, length, 4 * self.units))
        hiddens, contexts, attentions, gates = [], [], [], []
        for position in range(length):
            state, context, attention, gate = self._advance(projected[:, position], state, memory)
            hiddens.append(state.hidden)
            contexts.append(context)
            attentions.append(attention)
            gates.append(gate)
        logits = self._logits(
            words,
            ops.reshape(ops.stack(hiddens, axis=1), (-1, self.units)),
            ops.reshape(ops.stack(contexts, axis=1), (-1, regions.shape[-1])),
            training,
        )
        outputs = {"logits": ops.reshape(logits, (photos, captions, length, self.vocabulary_size))}
        if self.attention is not None:
            outputs["attention"] = ops.stack(attentions, axis=2)
            outputs["gate"] = ops.stack(gates, axis=2)
        return outputs

    def _advance(
        self, projected: Any, state: DecoderState, memory: Memory
    ) -> tuple[DecoderState, Any, Any, Any]:
        """The recurrence: look, then LSTM (eqs. 1-5).

        Args:
            projected: `(N, 4H)`, the previous word's embedding times `word_kernel`.
            state: h_{t-1}, c_{t-1}.
            memory: regions and keys.

        Returns:
            The new state, the gated context `(N, D)`, alpha `(B, C, L)` and beta `(B, C)`.
        """
        photos, depth = ops.shape(memory.regions)[0], memory.regions.shape[-1]
        if self.attention is None:
            captions = ops.shape(projected)[0] // photos
            context = ops.reshape(ops.repeat(memory.keys, captions, axis=1), (-1, depth))
            attention = gate = None
        else:
            query = ops.reshape(state.hidden, (photos, -1, self.units))  # h_{t-1}: it looks first
            context, attention = self.attention.attend(query, memory.keys, memory.regions)
            beta = self.gate(state.hidden)  # (N, 1): one scalar per word
            context = beta * ops.reshape(context, (-1, depth))
            gate = ops.cast(ops.reshape(beta, (photos, -1)), "float32")
        preactivation = (
            projected
            + ops.matmul(context, self.context_kernel)
            + ops.matmul(state.hidden, self.recurrent_kernel)
            + self.lstm_bias
        )
        input_gate, forget_gate, candidate, output_gate = ops.split(preactivation, 4, axis=-1)
        cell = ops.sigmoid(forget_gate) * state.cell + ops.sigmoid(input_gate) * ops.tanh(candidate)
        hidden = ops.sigmoid(output_gate) * ops.tanh(cell)
        return DecoderState(hidden, cell), context, attention, gate

    def _logits(self, embedded: Any, hidden: Any, context: Any, training: bool = False) -> Any:
        """Deep output layer, eq. 7: `L_o tanh(E y_{t-1} + L_h h_t + L_z z_t)`, rows `(…, V)`."""
        hidden = self.drop_hidden(hidden, training=training)
        mixed = ops.tanh(embedded + self.head_hidden(hidden) + self.head_context(context))
        return self.head_words(self.drop_head(mixed, training=training))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "units": self.units,
            "attention_units": self.attention_units,
            "embedding_units": self.embedding_units,
            "attention": self.attention_kind,
            "score": self.score,
            "dropout": self.dropout,
        }


@keras.saving.register_keras_serializable("captioner")
def _forget_gate_open(shape: Any, dtype: Any = None) -> Any:
    quarter = shape[0] // 4
    return ops.concatenate(
        [ops.zeros(quarter, dtype), ops.ones(quarter, dtype), ops.zeros(2 * quarter, dtype)]
    )
