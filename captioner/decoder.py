"""The recurrent decoder of *Show, Attend and Tell*: initial state, step, word head.

Reference: Xu et al. 2015, sections 3.1.2 and 4.2.1, and the authors' kelvinxu/arctic-captions.

Shapes: `B` photos, `C` captions per photo, `T` words, `L` regions, `D` region channels, `H` units,
`A` attention units, `E` embedding units, `V` vocabulary. Captions of a photo share its regions and
keys; inside, `N = B * C` captions stand in one row so that every product is a 2-D one.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from captioner.attention import SCORES, Attention, flat_matmul, weighted_sum
from captioner.packing import Packing
from captioner.products import Kernel, late_gradient, late_values, product, turned

__all__ = ["ATTENTIONS", "LOOKS", "Decoder", "DecoderState", "Memory", "StepOutput"]

ATTENTIONS = ("soft", "hard", "none")
LOOKS = ("expected", "sampled", "argmax")


class Memory(NamedTuple):
    """What does not change from word to word, computed once.

    Attributes:
        regions: `(B, L, D)`, a_1..a_L of the paper; without attention their mean, `(B, 1, D)`.
            Or what each of them gives the LSTM, `(B, L, 4H)`, for search also the word head,
            `(B, L, 4H + E)`; without attention the word head alone, `(B, 1, E)`.
        keys: `(B, L, A)`, the regions prepared for the score function; without attention what the
            mean region gives the LSTM at every word, `(B, 1, 4H)`.
        hidden_kernel: everything that h_{t-1} is multiplied with, side by side: for the query, the
            gate and the LSTM, `(H, A + 1 + 4H)`; `A` is 0 where queries are compared as they are.
        context_kernel: of the LSTM, `(D, 4H)`; `None` where regions have gone through it.
        transposed: `(B, D, L)`, the regions, for the way back of whole captions; else `None`.
    """

    regions: Any
    keys: Any
    hidden_kernel: Kernel
    context_kernel: Kernel | None
    transposed: Any = None

    def for_whole_captions(self) -> "Memory":
        """Prepared for a loop whose kernels get their gradient after it, as do regions that have
        gone through one."""
        regions, context_kernel = self.regions, self.context_kernel
        if context_kernel is None:
            regions = ops.stop_gradient(regions)
        else:
            context_kernel = context_kernel.for_late_gradient()
        return self._replace(
            regions=regions,
            hidden_kernel=self.hidden_kernel.for_late_gradient(),
            context_kernel=context_kernel,
            transposed=turned(regions),
        )


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
        attention: `soft`: the context is the mean of the regions weighted by alpha; `hard`: it is
            one region, drawn from Multinoulli(alpha) while training (section 4.1); `none`: the
            mean region is the context of every word.
        score: score function of the attention, a name in `captioner.attention.SCORES`.
        word_query: whether the query of the attention is [h_{t-1}; E y_{t-1}] instead of h_{t-1}.
            h_{t-1} was made before y_{t-1} was written, so in the paper where it looks for
            "circle" after "red" cannot depend on "red": of two things it may name the one's colour
            and the other's shape.
        tied: whether the word head writes with the vectors of the embedding (Press and Wolf 2017)
            instead of weights of its own.
        dropout: share of units dropped while training: of the embeddings, of the mean region
            before the initial state, of h before the word head, and after the head's tanh.
        expected_share: for hard attention, the share of photos that train with the expected
            context, as if attention were soft (section 4.1: 1/2, drawn per photo).

    Call arguments:
        regions: `(B, L, D)`.
        tokens: `(B, C, T)` int, previous words: `<start>` first; pads may follow the end.
        words: `(B, C, T)` bool, where a next word is wanted. The others' logits are left out, and
            what follows a caption's end is hardly computed at all.
        expected_share: for hard attention, a scalar in place of the one it was made with.

    Returns:
        A dict: `logits (B, C, T, V)`, and unless attention is `none`, `attention (B, C, T, L)`,
        always alpha, never the samples, and `gate (B, C, T)`. While hard attention trains, also
        `log_chosen (B, C, T)`, log alpha of the region drawn, and `drawn (B,)`, 0 for the photos
        that trained with the expected context. Where `words` are given, logits are those of the R
        words alone, `(R, V)`, `place (R,)` says which of the `B * C * T` they are, and elsewhere
        the others are arbitrary or 0.
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
        expected_share: float = 0.5,
        word_query: bool = False,
        tied: bool = False,
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
        self.expected_share = expected_share
        self.word_query = word_query
        self.tied = tied
        self.random = keras.random.SeedGenerator(name="regions")

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
        self.head_words: Any = None
        if not tied:
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
            asking = units + self.embedding_units if self.word_query else units
            self.attention.build((None, None, asking), (None, None, depth))
            self.gate.build((None, units))
        self.head_hidden.build((None, units))
        self.head_context.build((None, depth))
        if self.tied:
            self.word_bias = self.add_weight(
                shape=(self.vocabulary_size,), initializer="zeros", name="word_bias"
            )
        else:
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

    def begin(self, regions: Any, captions: int = 1) -> tuple[Memory, DecoderState]:
        """What the photo alone decides, for search: keys and the initial state.

        Args:
            regions: `(B, L, D)`.
            captions: `C`, captions to be written per photo.
        """
        memory, state = self._begin(regions, captions)
        # LSTM and word head are linear in the context, a weighted sum of regions, so regions can go
        # through their kernels first. It is the same, and less to read at every word.
        given = [self.head_context(memory.regions)]
        if self.attention is not None:
            given = [flat_matmul(memory.regions, self.context_kernel), *given]
        given_by_regions = ops.concatenate(given, axis=-1)
        return memory._replace(regions=given_by_regions, context_kernel=None), state

    def _begin(
        self, regions: Any, captions: int, training: bool = False
    ) -> tuple[Memory, DecoderState]:
        """Keys and the initial state (init-MLPs of section 3.1.2)."""
        mean = ops.mean(regions, axis=1)  # (B, D)
        # As tensors: a variable inside `product` would get its gradient there.
        context_kernel = tf.identity(self.context_kernel)
        if self.attention is None:
            keys = ops.matmul(mean, context_kernel)[:, None]
            attended = mean[:, None]
        else:
            keys = self.attention.score.prepare(regions)
            attended = regions
        memory = Memory(attended, keys, Kernel(self._hidden_kernel()), Kernel(context_kernel))
        mean = self.drop_mean(mean, training=training)
        hidden, cell = self.initial_hidden(mean), self.initial_cell(mean)
        return memory, DecoderState(
            ops.repeat(hidden, captions, axis=0), ops.repeat(cell, captions, axis=0)
        )

    def step(
        self, tokens: Any, state: DecoderState, memory: Memory, look: str = "expected"
    ) -> StepOutput:
        """One word further, for search.

        Args:
            tokens: `(B, C)` int, the previous words.
            state: from `begin` or the step before.
            memory: from `begin`.
            look: what the context is made of: `expected`, the mean weighted by alpha; `sampled`,
                one region drawn from it; `argmax`, its heaviest region.
        """
        shape = ops.shape(tokens)
        embedded = self.embedding(ops.reshape(tokens, (-1,)))  # (N, E)
        added = self._beside(embedded, self._of_words(embedded))
        state, context, _, seen = self._advance(embedded, added, state, memory, look)
        logits = self._logits(self._mixed(embedded, state.hidden, context))
        logits = ops.reshape(logits, (*shape, self.vocabulary_size))
        return StepOutput(logits, state, seen.get("attention"), seen.get("gate"))

    def call(
        self,
        regions: Any,
        tokens: Any,
        training: bool = False,
        words: Any = None,
        expected_share: Any = None,
    ) -> dict[str, Any]:
        regions = ops.cast(regions, self.compute_dtype)
        photos, captions, length = ops.shape(tokens)
        # An unrolled loop needs to know how often: Captioner.make_train_function sees to that.
        if not isinstance(length, int) or not isinstance(captions, int):
            raise ValueError(
                "the numbers of captions and of words must be known: give tokens a static shape"
            )
        packing = Packing((photos, captions, length), words)
        memory, state = self._begin(regions, captions, training)
        assert memory.context_kernel is not None  # as it is for search
        of_context, of_hidden = memory.context_kernel.matrix, memory.hidden_kernel.matrix
        # What the context gives, regions can be asked for before they are weighed, or the weighted
        # sums after. The first is fewer products, for few regions and many words: with 49 regions a
        # step of training takes 0.9 of the time, with 81 about the same, with 196 1.1 to 1.4.
        by_region = self.attention is not None and 2 * regions.shape[1] <= 3 * captions * length
        given = memory.regions
        if by_region:
            given = flat_matmul(memory.regions, of_context)
            memory = memory._replace(regions=given, context_kernel=None)
        memory = memory.for_whole_captions()
        embedded = self.embedding(packing.pack(tokens))  # (M, E)
        embedded = self.drop_embedding(embedded, training=training)
        outputs, look, drawn = {}, "expected", None
        if training and self.attention_kind == "hard":
            coin = keras.random.uniform((photos, 1, 1), seed=self.random)
            share = self.expected_share if expected_share is None else expected_share
            drawn = ops.cast(coin >= ops.cast(share, "float32"), "float32")
            outputs["drawn"] = drawn[:, 0, 0]
            look = "sampled"
        before: list[Any] = []  # h_{t-1} of every step
        after: list[Any] = []
        contexts: list[Any] = []
        looked: list[Any] = []
        seen = []
        added = self._of_words(embedded)
        if by_region:
            added = late_values(added, given, looked, packing.by_photo)
        elif self.attention is not None:
            added = late_gradient(added, of_context, contexts)
        added = late_gradient(self._beside(embedded, added), of_hidden, before)
        steps = zip(packing.steps(embedded), packing.steps(added), strict=True)
        for number, (word, added_now) in enumerate(steps):
            state = DecoderState(*(packing.narrowed(part, number) for part in state))
            before.append(state.hidden)
            state, context, weights, seen_now = self._advance(
                word, added_now, state, memory, look, drawn
            )
            after.append(state.hidden)
            contexts.append(context)
            looked.append(weights)
            seen.append(seen_now)
        if by_region:
            every = ops.matmul(ops.concatenate(looked, axis=1), self.head_context(regions))
            of_contexts = packing.from_photos(every)
        else:
            of_contexts = self.head_context(ops.concatenate(contexts, axis=0))
        mixed = self._mixed(embedded, ops.concatenate(after, axis=0), of_contexts, training)
        mixed, place = packing.only_words(mixed)
        logits = self._logits(mixed)
        if words is None:
            shape = (photos * captions * length, self.vocabulary_size)
            logits = ops.scatter(place[:, None], logits, shape)
            logits = ops.reshape(logits, (photos, captions, length, self.vocabulary_size))
        else:
            outputs["place"] = place
        outputs["logits"] = logits
        for name in seen[0]:
            outputs[name] = packing.spread([seen_now[name] for seen_now in seen])
        return outputs

    @property
    def _query_units(self) -> int:
        """How wide a projected query is; 0 where queries are compared as they are."""
        kernel = None if self.attention is None else self.attention.score.query_kernel
        return 0 if kernel is None else kernel.shape[1]

    def _hidden_kernel(self) -> Any:
        """All that h is multiplied with: [query | gate | LSTM]."""
        kernels = []
        if self._query_units:
            kernels.append(self.attention.score.query_kernel[: self.units])
        if self.attention is not None:
            kernels.append(self.gate.kernel)
        kernels.append(self.recurrent_kernel)
        return ops.concatenate([ops.cast(one, self.compute_dtype) for one in kernels], axis=1)

    def _of_words(self, embedded: Any) -> Any:
        """What words alone give the LSTM, `(N, E)` to `(N, 4H)`."""
        return ops.matmul(embedded, self.word_kernel) + self.lstm_bias

    def _beside(self, embedded: Any, of_words: Any) -> Any:
        """What is added to h times its kernel: for query and gate, beside what words give."""
        rows, parts = ops.shape(embedded)[0], []
        if self._query_units:
            if self.word_query:
                kernel = ops.convert_to_tensor(self.attention.score.query_kernel)[self.units :]
                parts.append(ops.matmul(embedded, kernel))
            else:
                parts.append(ops.zeros((rows, self._query_units), embedded.dtype))
        if self.attention is not None:
            parts.append(ops.repeat(ops.cast(self.gate.bias, embedded.dtype)[None], rows, axis=0))
        return ops.concatenate([*parts, of_words], axis=1)

    def _advance(
        self,
        word: Any,
        added: Any,
        state: DecoderState,
        memory: Memory,
        look: str = "expected",
        drawn: Any = None,
    ) -> tuple[DecoderState, Any, Any, dict[str, Any]]:
        """The recurrence: look, then LSTM (eqs. 1-5).

        Args:
            word: `(N, E)`, the previous word's embedding.
            added: `(N, A + 1 + 4H)`, from `_beside`.
            state: h_{t-1}, c_{t-1}.
            memory: what does not change from word to word.
            look: as for `step`.
            drawn: `(B, 1, 1)`, 0 for photos that see the expected context although `look` says
                `sampled`; `None` for none of them.

        Returns:
            The new state; the gated context `(N, D)`, or where regions have gone through kernels
            what it gives the word head `(N, E)`, if that is among them, else `(N, 0)`; the weights
            that it is made of, beta alpha `(B, C, L)`, `None` without attention; and what was seen:
            alpha `(B, C, L)`, beta `(B, C)`, and of a sampled region log alpha `(B, C)`, by the
            names of the outputs.
        """
        photos, depth = ops.shape(memory.regions)[0], memory.regions.shape[-1]
        seen: dict[str, Any] = {}
        looked = None
        # It looks first: query and gate are of h_{t-1}.
        mixed = added + product(state.hidden, memory.hidden_kernel)
        if self.attention is None:
            captions = ops.shape(mixed)[0] // photos
            context, lstm = (
                ops.reshape(ops.repeat(one, captions, axis=1), (-1, one.shape[-1]))
                for one in (memory.regions, memory.keys)
            )
            lstm = mixed + lstm
        else:
            units = self._query_units
            query, beta, lstm = ops.split(mixed, [units, units + 1], axis=1)
            if not units:
                query = state.hidden
                if self.word_query:
                    query = ops.concatenate([query, word], axis=-1)
            query = ops.reshape(query, (photos, -1, query.shape[-1]))
            log_alpha = self.attention.log_weights(query, memory.keys)
            seen["attention"] = weights = ops.exp(log_alpha)
            if look != "expected":
                chosen = self._choose(log_alpha, look)
                if look == "sampled":
                    seen["log_chosen"] = ops.sum(chosen * log_alpha, axis=-1)
                # No gradient flows through a choice: it is estimated in `captioner.reinforce`.
                weights = chosen if drawn is None else drawn * chosen + (1 - drawn) * weights
            beta = ops.reshape(ops.sigmoid(beta), (photos, -1, 1))  # one scalar per word
            beta = ops.cast(beta, "float32")
            seen["gate"] = beta[..., 0]
            # The gate on the weights, of which there are fewer than channels.
            looked = ops.cast(beta * weights, self.compute_dtype)
            context = weighted_sum(looked, memory.regions, memory.transposed)
            context = ops.reshape(context, (-1, depth))
            if memory.context_kernel is None:
                of_lstm, context = ops.split(context, [4 * self.units], axis=-1)
            else:
                of_lstm = product(context, memory.context_kernel)
            lstm = lstm + of_lstm
        input_gate, forget_gate, candidate, output_gate = ops.split(lstm, 4, axis=-1)
        cell = ops.sigmoid(forget_gate) * state.cell + ops.sigmoid(input_gate) * ops.tanh(candidate)
        hidden = ops.sigmoid(output_gate) * ops.tanh(cell)
        return DecoderState(hidden, cell), context, looked, seen

    def reseed(self, seed: int) -> None:
        """Makes what hard attention draws from here on depend on `seed` alone."""
        self.random.state.assign(ops.array([seed, 0], self.random.state.dtype))

    def _choose(self, log_alpha: Any, look: str) -> Any:
        """One region per word as a one-hot row, `(B, C, L)`: s_t of section 4.1."""
        regions = log_alpha.shape[-1]
        if look == "argmax":
            number = ops.argmax(log_alpha, axis=-1)
        else:
            rows = ops.reshape(log_alpha, (-1, regions))
            number = keras.random.categorical(rows, 1, seed=self.random)
            number = ops.reshape(number, ops.shape(log_alpha)[:-1])
        return ops.one_hot(number, regions, dtype="float32")

    def _mixed(self, embedded: Any, hidden: Any, of_context: Any, training: bool = False) -> Any:
        """Deep output layer, eq. 7: `tanh(E y_{t-1} + L_h h_t + L_z z_t)`, rows `(N, E)`."""
        hidden = self.drop_hidden(hidden, training=training)
        mixed = ops.tanh(embedded + self.head_hidden(hidden) + of_context)
        return self.drop_head(mixed, training=training)

    def _logits(self, mixed: Any) -> Any:
        """Of rows `(N, E)` from `_mixed`, scores of every word `(N, V)`: L_o of eq. 7."""
        if self.head_words is not None:
            return self.head_words(mixed)
        vectors = ops.convert_to_tensor(self.embedding.embeddings)
        vectors = turned(ops.cast(vectors, self.compute_dtype))
        return ops.matmul(mixed, vectors) + self.word_bias

    @property
    def by_word(self) -> list[tuple[Any, int]]:
        """Weights that have a part for every word, and the axis on which the words stand."""
        if self.head_words is None:
            return [(self.embedding.embeddings, 0), (self.word_bias, 0)]
        head = self.head_words
        return [(self.embedding.embeddings, 0), (head.kernel, 1), (head.bias, 0)]

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
            "expected_share": self.expected_share,
            "word_query": self.word_query,
            "tied": self.tied,
        }


@keras.saving.register_keras_serializable("captioner")
def _forget_gate_open(shape: Any, dtype: Any = None) -> Any:
    quarter = shape[0] // 4
    return ops.concatenate(
        [ops.zeros(quarter, dtype), ops.ones(quarter, dtype), ops.zeros(2 * quarter, dtype)]
    )
