"""How the words of a caption are chosen: greedily, by sampling, or by beam search.

Nothing here knows a model. A `Step` callback reads the previous words and says how likely every
next word is; the functions below choose, and `hypotheses` reads what they found, best first.
Letters: `B` photos, `K` beams (or samples) per photo, `V` vocabulary, `L` regions, `T` words.

All three rank by one length rule (Wu et al. 2016, section 7, in its plain form):

    score = (sum of log p of the words and of the end token) / (number of tokens) ** length_penalty

where the end token counts as a token, and a caption cut off at `max_words` has none. 0 ranks by
probability alone, which favours short captions; 1 by the mean per token. Finished captions rank
before unfinished ones, whose scores lack the end token's log p, and equal scores rank by age, then
by the lower slot and token id, so that an answer never depends on the sorting algorithm.

A search is TensorFlow from the first word to the last: inside a `tf.function` it is one graph,
outside it runs step by step, and the callback may then compute with anything. Photos that are done
leave: steps are made for those that are not, as rows `R <= B`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from captioner.errors import InputError

__all__ = [
    "DEFAULT_LENGTH_PENALTY",
    "Found",
    "Hypothesis",
    "Step",
    "StepOutput",
    "beam",
    "greedy",
    "hypotheses",
    "length_rule",
    "sample",
]

DEFAULT_LENGTH_PENALTY = 0.7
NOTHING = -1  # no token
LEAVE = 0.75  # done photos leave together, once no more than this share of the rows is left


class StepOutput(NamedTuple):
    """What a step says about the next word of every beam.

    Attributes:
        log_probabilities: `(R, K, V)`, normalised log p of the next word.
        state: the state after reading the previous words.
        attention: `(R, K, L)`, the map used for the next word; `None` without attention.
        gate: `(R, K)`, beta for the next word; `None` without attention.
    """

    log_probabilities: Any
    state: Any
    attention: Any
    gate: Any


Step = Callable[[Any, Any, Any], StepOutput]
"""`step(tokens, state, memory)`: tokens are the previous words, `(R, K)` int32; the state, any
structure of tensors `(R, K, ...)`, is what changes from word to word; the memory, any structure of
tensors `(R, ...)`, is what belongs to a photo and does not change."""


class Found(NamedTuple):
    """The captions that a search found, as tensors: `N` per photo, best first.

    `T` is `max_words`; what stands after a caption's last word means nothing.

    Attributes:
        tokens: `(B, N, T)`.
        log_probabilities: `(B, N, T)`, as of `Hypothesis`.
        scores: `(B, N)`, by the length rule; -inf where fewer captions exist.
        lengths: `(B, N)`, words.
        finished: `(B, N)`, whether it ended by the end token.
        attention: `(B, N, T, L)`; `None` without attention.
        gate: `(B, N, T)`; `None` without attention.
        nan: number of words after which the step gave NaN, or -1; then nothing else counts.
        stuck: whether no word was allowed somewhere; likewise.
    """

    tokens: Any
    log_probabilities: Any
    scores: Any
    lengths: Any
    finished: Any
    attention: Any
    gate: Any
    nan: Any
    stuck: Any


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """One caption as a search found it.

    Attributes:
        tokens: its `T` words, without start and end.
        log_probabilities: `(T,)`, log p of each word in the model's own distribution, whatever
            the temperature and the banned words.
        score: by the length rule; what the search ranks by.
        finished: `True` if it ended by the end token, `False` if it was cut off at `max_words`.
        attention: `(T, L)`, the map used for each word; `None` without attention.
        gate: `(T,)`, beta of each word; `None` without attention.
    """

    tokens: tuple[int, ...]
    log_probabilities: np.ndarray
    score: float
    finished: bool
    attention: np.ndarray | None
    gate: np.ndarray | None


def length_rule(length_penalty: float) -> str:
    """The ranking rule in words, for score files."""
    total = "sum of log p of the words and the end token"
    if length_penalty == 0:
        return f"{total}, not normalised by length"
    return f"({total}) / (number of tokens, end included) ** {length_penalty:g}"


def greedy(
    step: Step,
    state: Any,
    memory: Any = (),
    regions: int | None = None,
    *,
    start: int,
    end: int,
    banned: Collection[int],
    max_words: int,
    min_words: int = 1,
    length_penalty: float = DEFAULT_LENGTH_PENALTY,
    no_repeat: int = 0,
    sums: tf.DType = tf.float64,
) -> Found:
    """The most probable word, every time.

    Args:
        step: the model.
        state: tensors `(B, 1, ...)`, before the first word.
        memory: tensors `(B, ...)`, what the step needs of every photo.
        regions: `L`, if maps and gates are to be kept.
        start: token id given to the step as the word before the first.
        end: token id that ends a caption.
        banned: token ids never emitted (pad, start, unknown).
        max_words: a caption longer than this is cut off.
        min_words: the end token is not allowed before this many words.
        length_penalty: see the module; it changes the score, not the words.
        no_repeat: no sequence of this many words, at least 2, stands in a caption twice; 0: any
            may.
        sums: number type of what is added up over words and ranked: float64 whatever the model's,
            unless the graph is for a runtime that has none.

    Returns:
        One caption for each of the `B` photos.

    Raises:
        InputError: an option is out of range.
    """
    limits = _Limits(start, end, banned, min_words, max_words, length_penalty, no_repeat, sums)

    def most_probable(log_probabilities: Any, words: Any, rows: Any) -> Any:
        return tf.argmax(log_probabilities, axis=-1, output_type=tf.int32)

    return _roll_out(step, state, memory, regions, 1, most_probable, limits)


def sample(
    step: Step,
    state: Any,
    memory: Any = (),
    regions: int | None = None,
    *,
    start: int,
    end: int,
    banned: Collection[int],
    max_words: int,
    min_words: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: Any = 0,
    count: int = 1,
    length_penalty: float = DEFAULT_LENGTH_PENALTY,
    no_repeat: int = 0,
) -> Found:
    """Words drawn from the model's distribution, sharpened and truncated as asked.

    In order: banned words go, log p is divided by `temperature`, the `top_k` most probable words
    stay, then of those the smallest set whose probability reaches `top_p` (nucleus sampling,
    Holtzman et al. 2020). One random stream serves the batch: the same call gives the same
    captions, but a photo's draws depend on its place in the batch.

    Args:
        step, state, memory, regions, start, end, banned, max_words, min_words, length_penalty,
            no_repeat: as in `greedy`.
        temperature: above 0; below 1 sharpens, above 1 flattens.
        top_k: how many words may be drawn; `None` for all.
        top_p: probability, in (0, 1], that the words which may be drawn must reach; 1 for all.
        seed: of the random numbers: an int, or a scalar tensor.
        count: samples per photo; they may repeat.

    Returns:
        `count` captions for each of the `B` photos.

    Raises:
        InputError: an option is out of range.
    """
    limits = _Limits(start, end, banned, min_words, max_words, length_penalty, no_repeat)
    _require(temperature > 0, "temperature", temperature, "above 0")
    _require(top_k is None or top_k >= 1, "top_k", top_k, "at least 1")
    _require(0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
    _require(not isinstance(seed, int) or seed >= 0, "seed", seed, "at least 0")
    _require(count >= 1, "count", count, "at least 1")
    photos = tf.shape(tf.nest.flatten(state)[0])[0]

    def draw(log_probabilities: Any, words: Any, rows: Any) -> Any:
        # Divided after the maximum is taken off, so that a tiny temperature cannot overflow. Sums
        # over V are drawn from: float64 whatever the model's.
        sharp = tf.cast(log_probabilities, tf.float64)
        sharp = (sharp - tf.reduce_max(sharp, axis=-1, keepdims=True)) / temperature
        likelihood = tf.exp(sharp)
        if top_k is not None:
            likelihood = _keep_top_k(likelihood, top_k)
        if top_p < 1:
            likelihood = _keep_top_p(likelihood, top_p)
        cumulative = tf.cumsum(likelihood, axis=-1)
        # For all photos, whoever is done, or a photo's draws would depend on its neighbours'.
        uniform = tf.random.stateless_uniform(
            (photos, count), tf.stack([tf.cast(seed, tf.int32), words]), dtype=tf.float64
        )
        # Inverse of the distribution function; below the total even when rounding says otherwise.
        total = cumulative[..., -1:]
        threshold = tf.gather(uniform, rows)[..., None] * total
        threshold = tf.minimum(threshold, tf.math.nextafter(total, tf.zeros_like(total)))
        return tf.reduce_sum(tf.cast(cumulative <= threshold, tf.int32), axis=-1)

    return _roll_out(step, state, memory, regions, count, draw, limits)


def beam(
    step: Step,
    state: Any,
    memory: Any = (),
    regions: int | None = None,
    *,
    start: int,
    end: int,
    banned: Collection[int],
    max_words: int,
    min_words: int = 1,
    beam: int = 5,
    n_best: int = 1,
    length_penalty: float = DEFAULT_LENGTH_PENALTY,
    no_repeat: int = 0,
    sums: tf.DType = tf.float64,
) -> Found:
    """The best captions that keeping `beam` beginnings at a time can find.

    At every step each live beam may end, which puts it into the photo's pool of the `n_best`
    finished captions, and the `beam` best continuations by a word live on. An ending therefore
    never takes a live beam's place; taking the best `2 * beam` of words and endings together
    (tensor2tensor, fairseq) gives the same live beams and a subset of the endings. A photo is
    done when its pool is full and no live beam could still get into it, however it went on.

    A beam of 1 is greedy search: with one beginning, the likeliest next token is followed, even
    where the length rule would prefer to end earlier or later.

    Args:
        step, state, memory, regions, start, end, banned, max_words, min_words, no_repeat, sums: as
            in `greedy`.
        beam: `K`, how many beginnings are kept.
        n_best: how many captions to find for each photo.
        length_penalty: see the module.

    Returns:
        `n_best` captions for each of the `B` photos, all different; fewer only where fewer exist.

    Raises:
        InputError: an option is out of range.
    """
    limits = _Limits(start, end, banned, min_words, max_words, length_penalty, no_repeat, sums)
    _require(beam >= 1, "beam", beam, "at least 1")
    _require(1 <= n_best <= beam, "n_best", n_best, f"from 1 to the beam size, {beam}")
    if beam == 1:
        return greedy(
            step, state, memory, regions, start=start, end=end, banned=banned,
            max_words=max_words, min_words=min_words, length_penalty=length_penalty,
            no_repeat=no_repeat, sums=sums,
        )  # fmt: skip
    rows = _Rows.all(state, memory, limits, beam)
    photos = tf.shape(rows.number)[0]
    # All beams begin alike: one lives, or each caption would be found `beam` times.
    first = tf.where(tf.range(beam) == 0, 0.0, -np.inf)
    live = tf.cast(tf.broadcast_to(first, (photos, beam)), sums)  # sum of log p
    nothing = tf.fill((photos, n_best), tf.constant(-np.inf, sums))
    zeros = tf.zeros((photos, n_best), tf.int32)
    pool = _Pool(nothing, zeros, zeros)
    every_slot = tf.range(beam)

    def body(words, rows, live, pool, lives, log, nan):  # type: ignore[no-untyped-def]
        output = _as_tensors(step(rows.tokens, rows.state, rows.memory))
        log_probabilities = output.log_probabilities  # (R, K, V)
        nan = tf.where(tf.reduce_any(tf.math.is_nan(log_probabilities)), words, nan)
        last = words == max_words
        where = rows.number[:, None]
        ending = tf.cast(log_probabilities[:, :, end], sums)
        ending = tf.where(words < min_words, tf.constant(-np.inf, sums), ending)
        ended = limits.score(live + ending, words + 1)
        slots = tf.broadcast_to(every_slot, tf.shape(ended))
        mine = _Pool(*(tf.gather(part, rows.number) for part in pool))
        mine = mine.merged(_Pool(ended, tf.fill(tf.shape(ended), words), slots))
        pool = _Pool(*(
            tf.tensor_scatter_nd_update(old, where, new)
            for old, new in zip(pool, mine, strict=True)
        ))  # fmt: skip

        # The best continuations are among every beam's own best.
        allowed = log_probabilities + limits.mask(log_probabilities, False)
        allowed = limits.without_repeats(allowed, rows.written)
        width = min(beam, allowed.shape[-1])
        values, following = tf.math.top_k(allowed, width)  # (R, K, width), ties: the lower token
        values, following = (
            tf.reshape(part, (-1, beam * width)) for part in (tf.cast(values, sums), following)
        )
        totals = tf.repeat(live, width, axis=1) + values
        better, chosen = tf.math.top_k(totals, beam)  # ties: the lower slot
        live = tf.where(last, live, better)  # at the last step nothing goes on
        lives = tf.tensor_scatter_nd_update(lives, where, live)
        parents = chosen // width
        tokens = tf.gather(following, chosen, batch_dims=1)
        of_word = tf.gather(values, chosen, batch_dims=1)
        choices = _Choices(parents, tokens, of_word, output.attention, output.gate)
        log = log.write(words, rows, photos, choices)
        state = tf.nest.map_structure(
            lambda part: tf.gather(part, parents, batch_dims=1), output.state
        )
        # Log p is at most 0 and the divisor grows with length: nothing can score above this.
        reachable = limits.score(live[:, 0], max_words + 1)
        done = tf.logical_or(mine.scores[:, -1] >= reachable, last)
        written = tf.nest.map_structure(
            lambda part: tf.gather(part, parents, batch_dims=1), rows.written
        )
        written = limits.with_words(written, tokens)
        rows = rows._replace(tokens=tokens, written=written, state=state)
        rows, (live,) = rows.without(done, (live,))
        return words + 1, rows, live, pool, lives, log, nan

    lives = tf.fill((photos, beam), tf.constant(-np.inf, sums))
    _, _, _, pool, lives, log, nan = _while(
        lambda words, rows, live, pool, lives, log, nan: (tf.size(rows.number) > 0) & (nan < 0),
        body,
        (
            tf.constant(0),
            rows,
            live,
            pool,
            lives,
            _Log.empty(rows, regions, limits),
            tf.constant(-1),
        ),
    )
    # Unfinished captions, cut off at `max_words`, only fill what the pool leaves empty.
    cut = lives[:, :n_best]
    shape = tf.shape(cut)
    ends = _Ends(
        scores=tf.concat([pool.scores, limits.score(cut, max_words)], axis=1),
        lengths=tf.concat([pool.lengths, tf.fill(shape, max_words)], axis=1),
        slots=tf.concat([pool.slots, tf.broadcast_to(every_slot[:n_best], shape)], axis=1),
        finished=tf.concat([tf.fill(shape, True), tf.fill(shape, False)], axis=1),
    )
    return log.read(ends.best(n_best), max_words, nan, tf.constant(False))


def hypotheses(found: Found) -> list[list[Hypothesis]]:
    """The captions of every photo, best first.

    Raises:
        ValueError: the step returned NaN, or gave every allowed word probability 0.
    """
    if int(found.nan) >= 0:
        raise ValueError(f"the step returned NaN log probabilities after {int(found.nan)} words")
    read = Found(*(None if part is None else np.asarray(part) for part in found))
    if read.stuck or not (read.scores > -np.inf).any(axis=1).all():
        raise ValueError(
            "the step gave every allowed next word probability 0: no caption is possible"
        )
    return [
        [_hypothesis(read, photo, int(place)) for place in np.flatnonzero(scores > -np.inf)]
        for photo, scores in enumerate(read.scores)
    ]


def _hypothesis(read: Found, photo: int, place: int) -> Hypothesis:
    length = int(read.lengths[photo, place])
    return Hypothesis(
        tokens=tuple(read.tokens[photo, place, :length].tolist()),
        log_probabilities=read.log_probabilities[photo, place, :length],
        score=float(read.scores[photo, place]),
        finished=bool(read.finished[photo, place]),
        attention=None if read.attention is None else read.attention[photo, place, :length],
        gate=None if read.gate is None else read.gate[photo, place, :length],
    )


def _require(condition: bool, option: str, value: object, what: str) -> None:
    if not condition:
        raise InputError(f"{option} is {value}: it must be {what}")


@dataclass(frozen=True)
class _Limits:
    """What a caption may consist of, and how it is scored; checks the options on the way in."""

    start: int
    end: int
    banned: Collection[int]
    min_words: int
    max_words: int
    length_penalty: float
    no_repeat: int
    sums: tf.DType = tf.float64

    def __post_init__(self) -> None:
        _require(self.max_words >= 1, "max_words", self.max_words, "at least 1")
        what = f"from 1 to max_words, {self.max_words}"
        _require(1 <= self.min_words <= self.max_words, "min_words", self.min_words, what)
        _require(self.length_penalty >= 0, "length_penalty", self.length_penalty, "at least 0")
        _require(
            self.no_repeat == 0 or self.no_repeat >= 2,
            "no_repeat",
            self.no_repeat,
            "0, or 2 or more",
        )
        if self.end in self.banned:
            raise ValueError(f"the end token {self.end} is banned: no caption could finish")

    def mask(self, log_probabilities: Any, may_end: Any) -> Any:
        """`(V,)`: what to add to log p: -inf for tokens that are not allowed, else 0."""
        token = tf.range(log_probabilities.shape[-1])
        forbidden = tf.reduce_any(token[:, None] == tf.constant(list(self.banned)), axis=1)
        forbidden |= (token == self.end) & tf.logical_not(may_end)
        return tf.cast(tf.where(forbidden, -np.inf, 0.0), log_probabilities.dtype)

    @property
    def remembered(self) -> int:
        """How many words back it must be known what was written."""
        return self.max_words if self.no_repeat else 0

    def with_words(self, written: Any, tokens: Any) -> Any:
        """What was written, with the next words: see `_Rows`."""
        if not self.remembered:
            return written
        return tf.concat([written, tokens[..., None]], axis=-1)[..., 1:]

    def without_repeats(self, allowed: Any, written: Any) -> Any:
        """`allowed (R, K, V)`, -inf for words that `no_repeat` forbids."""
        n, words = self.no_repeat, self.remembered
        if words < n or not n:
            return allowed
        # Every n - 1 words in a row that equal the last n - 1, and the word that followed them.
        same = tf.fill(tf.shape(written[..., n - 1 :]), True)
        for back in range(1, n):
            same &= written[..., n - 1 - back : words - back] == written[..., -back, None]
        following = tf.where(same, written[..., n - 1 :], NOTHING)
        again = tf.one_hot(following, allowed.shape[-1], on_value=True, off_value=False)
        again = tf.reduce_any(again, axis=-2)
        return tf.where(again, tf.constant(-np.inf, allowed.dtype), allowed)

    def score(self, total: Any, tokens: Any) -> Any:
        return total / tf.cast(tokens, self.sums) ** self.length_penalty


class _Rows(NamedTuple):
    """The photos that are not done."""

    number: Any  # (R,), which of the B photos
    tokens: Any  # (R, K), the last words
    written: Any  # (R, K, remembered), all words so far behind `NOTHING`; () if that is not needed
    state: Any  # of tensors (R, K, ...)
    memory: Any  # of tensors (R, ...)

    @classmethod
    def all(cls, state: Any, memory: Any, limits: _Limits, count: int) -> "_Rows":
        state, memory = (tf.nest.map_structure(tf.convert_to_tensor, x) for x in (state, memory))
        photos = tf.shape(tf.nest.flatten(state)[0])[0]
        state = tf.nest.map_structure(
            lambda part: tf.tile(part, [1, count] + [1] * (len(part.shape) - 2)), state
        )
        first = tf.fill((photos, count), limits.start)
        written: Any = ()
        if limits.remembered:
            written = tf.fill((photos, count, limits.remembered), NOTHING)
        return cls(tf.range(photos), first, written, state, memory)

    def without(self, done: Any, others: Any) -> tuple["_Rows", Any]:
        """Lets those who are done go, if they are many: that copies all the others' memory.

        Args:
            done: `(R,)` bool.
            others: more tensors `(R, ...)`.
        """
        everything = (self, others)
        left = tf.where(tf.logical_not(done))[:, 0]
        count = tf.shape(left)[0]
        few = tf.cast(count, tf.float32) <= LEAVE * tf.cast(tf.shape(done)[0], tf.float32)
        return tf.cond(
            few,
            lambda: tf.nest.map_structure(lambda part: tf.gather(part, left), everything),
            lambda: everything,
        )


class _Choices(NamedTuple):
    """What a step chose, and from which slot each came."""

    parents: Any  # (R, K)
    tokens: Any  # (R, K)
    log_probabilities: Any  # (R, K)
    attention: Any  # (R, K, L), or None
    gate: Any  # (R, K), or None


class _Ends(NamedTuple):
    """Where captions ended, any number per photo, in the order of age and slot."""

    scores: Any  # (B, M), -inf where there is none
    lengths: Any  # (B, M), words
    slots: Any  # (B, M), beam that held the caption after its last word
    finished: Any  # (B, M), whether it ended by the end token

    def best(self, wanted: int) -> "_Ends":
        """The first of the ranking."""
        # Sorting is stable: equal scores stay in the order of age and slot.
        order = tf.argsort(self.scores, axis=1, direction="DESCENDING", stable=True)
        later = tf.logical_not(tf.logical_and(self.finished, self.scores > -np.inf))
        later = tf.cast(tf.gather(later, order, batch_dims=1), tf.int32)
        first = tf.argsort(later, axis=1, stable=True)[:, :wanted]
        order = tf.gather(order, first, batch_dims=1)
        return _Ends(*(tf.gather(part, order, batch_dims=1) for part in self))


class _Log(NamedTuple):
    """Every step's `_Choices`, to be read back from the end: a `tf.TensorArray` for each.

    There is one step more than words: it only lets captions of `T` words end.
    """

    arrays: Any

    @classmethod
    def empty(cls, rows: _Rows, regions: int | None, limits: _Limits) -> "_Log":
        shape = tuple(rows.tokens.shape)
        shapes: list[Any] = [(tf.int32, shape), (tf.int32, shape), (limits.sums, shape)]
        if regions is not None:
            shapes += [(tf.float32, (*shape, regions)), (tf.float32, shape)]
        return cls(tuple(
            tf.TensorArray(dtype, limits.max_words + 1, element_shape=shape)
            for dtype, shape in shapes
        ))  # fmt: skip

    def write(self, words: Any, rows: _Rows, photos: Any, choices: _Choices) -> "_Log":
        """Adds the choices `(R, K, ...)` of a step, those of `rows` among all `photos`."""

        def of_all(values: Any) -> Any:  # 0 for those who are done
            values = tf.convert_to_tensor(values)
            shape = tf.concat([[photos], tf.shape(values)[1:]], axis=0)
            return tf.scatter_nd(rows.number[:, None], values, shape)

        # Without maps there are fewer arrays than choices.
        return _Log(tuple(
            array.write(words, of_all(values))
            for array, values in zip(self.arrays, choices, strict=False)
        ))  # fmt: skip

    def read(self, ends: _Ends, words: int, nan: Any, stuck: Any) -> Found:
        """The captions that ended so, `T = words` words each."""
        parents, *chosen = (array.stack()[:-1] for array in self.arrays)  # (T, B, K, ...)
        slots = [ends.slots]  # of a caption after words T, T - 1, ..., 0
        for word in reversed(range(words)):
            before = tf.gather(parents[word], slots[-1], batch_dims=1)
            slots.append(tf.where(word < ends.lengths, before, slots[-1]))
        slots.reverse()
        before, after = tf.stack(slots[:-1]), tf.stack(slots[1:])  # (T, B, N)
        # A word's map is what its parent looked at when it chose the word.
        tokens, log_probabilities, *looked = (
            tf.gather(values, path, batch_dims=2)
            for values, path in zip(chosen, (after, after, before, before), strict=False)
        )
        tokens, log_probabilities, *looked = (
            tf.transpose(part, (1, 2, 0, *range(3, len(part.shape))))  # (B, N, T, ...)
            for part in (tokens, log_probabilities, *looked)
        )
        attention, gate = looked or (None, None)
        return Found(
            tokens, log_probabilities, ends.scores, ends.lengths, ends.finished, attention, gate,
            nan, stuck,
        )  # fmt: skip


class _Pool(NamedTuple):
    """The best finished captions of every photo, best first; empty places score -inf."""

    scores: Any  # (B, n_best)
    lengths: Any  # (B, n_best), words
    slots: Any  # (B, n_best), beam that held the caption when it ended

    def merged(self, entries: "_Pool") -> "_Pool":
        """Lets more captions compete for the places."""
        joined = [tf.concat(pair, axis=1) for pair in zip(self, entries, strict=True)]
        scores, best = tf.math.top_k(joined[0], self.scores.shape[1])  # ties: the older one
        return _Pool(scores, *(tf.gather(part, best, batch_dims=1) for part in joined[1:]))


def _roll_out(
    step: Step,
    state: Any,
    memory: Any,
    regions: int | None,
    count: int,
    choose: Callable[[Any, Any, Any], Any],
    limits: _Limits,
) -> Found:
    """`count` captions per photo, each following one choice per word.

    Args:
        choose: tokens `(R, K)` by allowed log p `(R, K, V)`, the number of words so far, and which
            of the photos they are, `(R,)`.
    """
    rows = _Rows.all(state, memory, limits, count)
    photos = tf.shape(rows.number)[0]
    slots = tf.broadcast_to(tf.range(count), (photos, count))
    totals = tf.zeros((photos, count), limits.sums)  # sum of log p
    nobody = tf.fill((photos, count), False)
    everyone = (totals, tf.fill((photos, count), limits.max_words), nobody)

    def body(words, rows, totals, finished, everyone, log, nan, stuck):  # type: ignore[no-untyped-def]
        output = _as_tensors(step(rows.tokens, rows.state, rows.memory))
        log_probabilities = output.log_probabilities
        nan = tf.where(tf.reduce_any(tf.math.is_nan(log_probabilities)), words, nan)
        last = words == limits.max_words
        allowed = log_probabilities + limits.mask(log_probabilities, words >= limits.min_words)
        allowed = limits.without_repeats(allowed, rows.written)
        # What has ended ends again, at no cost.
        token = tf.range(allowed.shape[-1])
        again = tf.cast(tf.where(token == limits.end, 0.0, -np.inf), allowed.dtype)
        allowed = tf.where(finished[:, :, None], again, allowed)
        dead = tf.reduce_any(tf.reduce_max(allowed, axis=-1) == -np.inf)
        stuck = tf.logical_or(stuck, tf.logical_and(dead, tf.logical_not(last)))
        tokens = choose(allowed, words, rows.number)
        chosen = tf.cast(tf.gather(allowed, tokens, batch_dims=2), limits.sums)
        ends = tf.logical_and(tokens == limits.end, tf.logical_not(finished))
        finished = tf.logical_or(finished, ends)
        # At the last step nothing but an ending counts.
        counts = tf.logical_or(ends, tf.logical_not(last))
        totals += tf.where(counts, chosen, tf.zeros_like(chosen))
        where = rows.number[:, None]
        lengths = tf.where(ends, words, tf.gather(everyone[1], rows.number))
        everyone = tuple(
            tf.tensor_scatter_nd_update(old, where, new)
            for old, new in zip(everyone, (totals, lengths, finished), strict=True)
        )
        parents = tf.gather(slots, rows.number)
        choices = _Choices(parents, tokens, chosen, output.attention, output.gate)
        log = log.write(words, rows, photos, choices)
        done = tf.logical_or(tf.reduce_all(finished, axis=1), last)
        written = limits.with_words(rows.written, tokens)
        rows = rows._replace(tokens=tokens, written=written, state=output.state)
        rows, (totals, finished) = rows.without(done, (totals, finished))
        return words + 1, rows, totals, finished, everyone, log, nan, stuck

    _, _, _, _, everyone, log, nan, stuck = _while(
        lambda words, rows, totals, finished, everyone, log, nan, stuck: (
            (tf.size(rows.number) > 0) & (nan < 0) & ~stuck
        ),
        body,
        (
            tf.constant(0),
            rows,
            totals,
            nobody,
            everyone,
            _Log.empty(rows, regions, limits),
            tf.constant(-1),
            tf.constant(False),
        ),
    )
    totals, lengths, finished = everyone
    tokens = lengths + tf.cast(finished, tf.int32)
    ends = _Ends(limits.score(totals, tokens), lengths, slots, finished)
    return log.read(ends.best(count), limits.max_words, nan, stuck)


def _while(goes_on: Callable[..., Any], body: Callable[..., Any], first: Any) -> Any:
    """`tf.while_loop` whose tensors may lose rows."""

    def invariant(value: Any) -> Any:
        if isinstance(value, tf.TensorArray):
            return tf.TensorShape(None)
        return tf.TensorShape([None, *value.shape[1:]] if value.shape.rank else [])

    return tf.while_loop(
        goes_on,
        body,
        first,
        shape_invariants=tf.nest.map_structure(invariant, first),
        parallel_iterations=1,
    )


def _as_tensors(output: StepOutput) -> StepOutput:
    return StepOutput(*(
        None if part is None else tf.nest.map_structure(tf.convert_to_tensor, part)
        for part in output
    ))  # fmt: skip


def _keep_top_k(likelihood: Any, top_k: int) -> Any:
    """Sets all but the `top_k` largest of the last axis to 0, ties by the lower index."""
    words = likelihood.shape[-1]
    _, indices = tf.math.top_k(likelihood, min(top_k, words))
    kept = tf.reduce_any(tf.one_hot(indices, words, on_value=True, off_value=False), axis=-2)
    return tf.where(kept, likelihood, tf.zeros_like(likelihood))


def _keep_top_p(likelihood: Any, top_p: float) -> Any:
    """Sets to 0 what lies outside the smallest set of words that holds `top_p` of the sum."""
    ranked, order = tf.math.top_k(likelihood, likelihood.shape[-1])
    cumulative = tf.cumsum(ranked, axis=-1)
    # In the order of likelihood: those before which less than `top_p` lies.
    inside = cumulative - ranked < top_p * cumulative[..., -1:]
    back = tf.argsort(order, axis=-1)
    inside = tf.gather(inside, back, batch_dims=len(likelihood.shape) - 1)
    return tf.where(inside, likelihood, tf.zeros_like(likelihood))
