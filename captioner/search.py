"""How the words of a caption are chosen: greedily, by sampling, or by beam search.

Nothing here knows a model. A `Step` callback reads the previous words and says how likely every
next word is; the functions below choose, and hand back `Hypothesis` objects, best first. Letters:
`B` photos, `K` beams (or samples) per photo, `V` vocabulary, `L` regions, `T` words.

All three rank by one length rule (Wu et al. 2016, section 7, in its plain form):

    score = (sum of log p of the words and of the end token) / (number of tokens) ** length_penalty

where the end token counts as a token, and a caption cut off at `max_words` has none. 0 ranks by
probability alone, which favours short captions; 1 by the mean per token. Finished captions rank
before unfinished ones, whose scores lack the end token's log p, and equal scores rank by age, then
by the lower slot and token id, so that an answer never depends on the sorting algorithm.

Shapes stay `(B, K, ...)` from the first word to the last, finished photos included, so that a
compiled step is traced once.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from captioner.errors import InputError

__all__ = [
    "DEFAULT_LENGTH_PENALTY",
    "Hypothesis",
    "State",
    "Step",
    "StepOutput",
    "beam",
    "greedy",
    "length_rule",
    "sample",
]

DEFAULT_LENGTH_PENALTY = 0.7

_NOTHING_ALLOWED = "the step gave every allowed next word probability 0: no caption is possible"

State = tuple[np.ndarray, ...]
"""Whatever changes from word to word: arrays `(B, K, ...)`."""


class StepOutput(NamedTuple):
    """What a step says about the next word of every beam.

    Attributes:
        log_probabilities: `(B, K, V)`, normalised log p of the next word.
        state: the state after reading the previous words.
        attention: `(B, K, L)`, the map used for the next word; `None` without attention.
        gate: `(B, K)`, beta for the next word; `None` without attention.
    """

    log_probabilities: np.ndarray
    state: State
    attention: np.ndarray | None
    gate: np.ndarray | None


Step = Callable[[np.ndarray, State], StepOutput]
"""`step(tokens, state)`: tokens are the previous words, `(B, K)` int32."""


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
    state: State,
    *,
    start: int,
    end: int,
    banned: Collection[int],
    max_words: int,
    min_words: int = 1,
    length_penalty: float = DEFAULT_LENGTH_PENALTY,
) -> list[list[Hypothesis]]:
    """The most probable word, every time.

    Args:
        step: the model.
        state: arrays `(B, 1, ...)`, before the first word.
        start: token id given to the step as the word before the first.
        end: token id that ends a caption.
        banned: token ids never emitted (pad, start, unknown).
        max_words: a caption longer than this is cut off.
        min_words: the end token is not allowed before this many words.
        length_penalty: see the module; it changes the score, not the words.

    Returns:
        For each of the `B` photos, a list of its one hypothesis.

    Raises:
        InputError: an option is out of range.
        ValueError: the step returned NaN, or gives every allowed word probability 0.
    """
    limits = _Limits(start, end, banned, min_words, max_words, length_penalty)

    def most_probable(log_probabilities: np.ndarray) -> np.ndarray:
        return log_probabilities.argmax(axis=-1)

    return _roll_out(step, state, 1, most_probable, limits)


def sample(
    step: Step,
    state: State,
    *,
    start: int,
    end: int,
    banned: Collection[int],
    max_words: int,
    min_words: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    count: int = 1,
    length_penalty: float = DEFAULT_LENGTH_PENALTY,
) -> list[list[Hypothesis]]:
    """Words drawn from the model's distribution, sharpened and truncated as asked.

    In order: banned words go, log p is divided by `temperature`, the `top_k` most probable words
    stay, then of those the smallest set whose probability reaches `top_p` (nucleus sampling,
    Holtzman et al. 2020). One random stream serves the batch: the same call gives the same
    captions, but a photo's draws depend on its place in the batch.

    Args:
        step, state, start, end, banned, max_words, min_words, length_penalty: as in `greedy`.
        temperature: above 0; below 1 sharpens, above 1 flattens.
        top_k: how many words may be drawn; `None` for all.
        top_p: probability, in (0, 1], that the words which may be drawn must reach; 1 for all.
        seed: of the random numbers.
        count: samples per photo; they may repeat.

    Returns:
        For each of the `B` photos, its `count` hypotheses, best first.

    Raises:
        InputError: an option is out of range.
        ValueError: the step returned NaN, or gives every allowed word probability 0.
    """
    limits = _Limits(start, end, banned, min_words, max_words, length_penalty)
    _require(temperature > 0, "temperature", temperature, "above 0")
    _require(top_k is None or top_k >= 1, "top_k", top_k, "at least 1")
    _require(0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
    _require(seed >= 0, "seed", seed, "at least 0")
    _require(count >= 1, "count", count, "at least 1")
    generator = np.random.default_rng(seed)

    def draw(log_probabilities: np.ndarray) -> np.ndarray:
        # Divided after the maximum is taken off, so that a tiny temperature cannot overflow.
        likelihood = np.exp(
            (log_probabilities - log_probabilities.max(axis=-1, keepdims=True)) / temperature
        )
        if top_k is not None:
            likelihood = _keep_top_k(likelihood, top_k)
        if top_p < 1:
            likelihood = _keep_top_p(likelihood, top_p)
        cumulative = likelihood.cumsum(axis=-1)
        total = cumulative[..., -1:]
        # Inverse of the distribution function; below the total even when rounding says otherwise.
        threshold = generator.random(total.shape) * total
        threshold = np.minimum(threshold, np.nextafter(total, 0))
        return (cumulative <= threshold).sum(axis=-1)

    return _roll_out(step, state, count, draw, limits)


def beam(
    step: Step,
    state: State,
    *,
    start: int,
    end: int,
    banned: Collection[int],
    max_words: int,
    min_words: int = 1,
    beam: int = 5,
    n_best: int = 1,
    length_penalty: float = DEFAULT_LENGTH_PENALTY,
) -> list[list[Hypothesis]]:
    """The best captions that keeping `beam` beginnings at a time can find.

    At every step each live beam may end, which puts it into the photo's pool of the `n_best`
    finished captions, and the `beam` best continuations by a word live on. An ending therefore
    never takes a live beam's place; taking the best `2 * beam` of words and endings together
    (tensor2tensor, fairseq) gives the same live beams and a subset of the endings. A photo is
    done when its pool is full and no live beam could still get into it, however it went on.

    A beam of 1 is greedy search: with one beginning, the likeliest next token is followed, even
    where the length rule would prefer to end earlier or later.

    Args:
        step, state, start, end, banned, max_words, min_words: as in `greedy`.
        beam: `K`, how many beginnings are kept.
        n_best: how many captions to return for each photo.
        length_penalty: see the module.

    Returns:
        For each of the `B` photos, its `n_best` hypotheses, all different, best first; fewer only
        where fewer exist.

    Raises:
        InputError: an option is out of range.
        ValueError: the step returned NaN, or gives every allowed word probability 0.
    """
    limits = _Limits(start, end, banned, min_words, max_words, length_penalty)
    _require(beam >= 1, "beam", beam, "at least 1")
    _require(1 <= n_best <= beam, "n_best", n_best, f"from 1 to the beam size, {beam}")
    if beam == 1:
        return greedy(
            step,
            state,
            start=start,
            end=end,
            banned=banned,
            max_words=max_words,
            min_words=min_words,
            length_penalty=length_penalty,
        )
    photos = state[0].shape[0]
    state = _repeat(state, beam)
    tokens = np.full((photos, beam), start, np.int32)
    # All beams begin alike: one lives, or each caption would be found `beam` times.
    live = np.full((photos, beam), -np.inf)  # (B, K), sum of log p
    live[:, 0] = 0.0
    pool = _Pool.empty(photos, n_best)
    history = _History()
    for words in range(max_words + 1):
        output = step(tokens, state)
        log_probabilities = limits.allowed(output.log_probabilities, words)  # (B, K, V)
        pool = pool.merge(limits.score(live + log_probabilities[:, :, end], words + 1), words)
        if words == max_words:
            break
        log_probabilities[:, :, end] = -np.inf
        totals = (live[:, :, None] + log_probabilities).reshape(photos, -1)  # (B, K * V)
        chosen, live = _top(totals, beam)
        # Log p is at most 0 and the divisor grows with length: nothing can score above this.
        reachable = limits.score(live[:, 0], max_words + 1)
        if (pool.scores[:, -1] >= reachable).all():
            break
        parents, following = np.divmod(chosen, log_probabilities.shape[-1])
        tokens = following.astype(np.int32)
        word_log_probabilities = np.take_along_axis(
            log_probabilities.reshape(photos, -1), chosen, axis=1
        )
        history.append(parents, tokens, word_log_probabilities, output)
        state = _select(output.state, parents)

    captions = []
    for photo in range(photos):
        found = [
            history.hypothesis(photo, slot, length, score, finished=True)
            for score, length, slot in pool.ranked(photo)
        ]
        # Unfinished captions, cut off at `max_words`, only fill what the pool leaves empty.
        for slot in range(n_best - len(found)):
            if live[photo, slot] > -np.inf:
                score = float(limits.score(live[photo, slot], max_words))
                found.append(history.hypothesis(photo, slot, max_words, score, finished=False))
        if not found:
            raise ValueError(_NOTHING_ALLOWED)
        captions.append(found)
    return captions


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

    def __post_init__(self) -> None:
        _require(self.max_words >= 1, "max_words", self.max_words, "at least 1")
        what = f"from 1 to max_words, {self.max_words}"
        _require(1 <= self.min_words <= self.max_words, "min_words", self.min_words, what)
        _require(self.length_penalty >= 0, "length_penalty", self.length_penalty, "at least 0")
        if self.end in self.banned:
            raise ValueError(f"the end token {self.end} is banned: no caption could finish")

    def allowed(self, log_probabilities: np.ndarray, words: int) -> np.ndarray:
        """A `(B, K, V)` copy in which tokens not allowed after `words` words are at -inf."""
        # Sums over words are ranked, and sums over V drawn from: float64 whatever the model's.
        allowed = np.array(log_probabilities, np.float64)
        if np.isnan(allowed).any():
            raise ValueError(f"the step returned NaN log probabilities after {words} words")
        allowed[:, :, list(self.banned)] = -np.inf
        if words < self.min_words:
            allowed[:, :, self.end] = -np.inf
        return allowed

    def score(self, total: np.ndarray, tokens: int) -> np.ndarray:
        return total / tokens**self.length_penalty


@dataclass
class _History:
    """Every step's choices, and from which slot each came, to be read back from the end."""

    parents: list[np.ndarray] = field(default_factory=list)  # each (B, K)
    tokens: list[np.ndarray] = field(default_factory=list)  # each (B, K)
    log_probabilities: list[np.ndarray] = field(default_factory=list)  # each (B, K)
    attention: list[np.ndarray] = field(default_factory=list)  # each (B, K, L), or empty
    gate: list[np.ndarray] = field(default_factory=list)  # each (B, K), or empty

    def append(
        self,
        parents: np.ndarray,
        tokens: np.ndarray,
        log_probabilities: np.ndarray,
        output: StepOutput,
    ) -> None:
        self.parents.append(parents)
        self.tokens.append(tokens)
        self.log_probabilities.append(log_probabilities)
        if output.attention is not None:
            self.attention.append(np.asarray(output.attention))
        if output.gate is not None:
            self.gate.append(np.asarray(output.gate))

    def hypothesis(
        self, photo: int, slot: int, length: int, score: float, finished: bool
    ) -> Hypothesis:
        """The caption of `length` words that ended up in `slot` after its last word."""
        path = [slot]  # the caption's slot after words T, T - 1, ..., 0
        for parents in reversed(self.parents[:length]):
            path.append(int(parents[photo, path[-1]]))
        path.reverse()
        before, after = path[:-1], path[1:]

        def read(steps: Sequence[np.ndarray], slots: list[int]) -> np.ndarray:
            return np.stack([steps[word][photo, k] for word, k in enumerate(slots)])

        return Hypothesis(
            tokens=tuple(read(self.tokens, after).tolist()),
            log_probabilities=read(self.log_probabilities, after),
            score=score,
            finished=finished,
            # A word's map is what its parent looked at when it chose the word.
            attention=read(self.attention, before) if self.attention else None,
            gate=read(self.gate, before) if self.gate else None,
        )


class _Pool(NamedTuple):
    """The best finished captions of every photo, best first; empty places score -inf."""

    scores: np.ndarray  # (B, n_best)
    lengths: np.ndarray  # (B, n_best), words
    slots: np.ndarray  # (B, n_best), beam that held the caption when it ended

    @classmethod
    def empty(cls, photos: int, n_best: int) -> "_Pool":
        places = np.zeros((photos, n_best), np.intp)
        return cls(np.full(places.shape, -np.inf), places, places)

    def merge(self, scores: np.ndarray, length: int) -> "_Pool":
        """Lets the `(B, K)` captions that end after `length` words compete for the places."""
        entries = _Pool(
            scores,
            np.full(scores.shape, length),
            np.broadcast_to(np.arange(scores.shape[1]), scores.shape),
        )
        joined = [np.concatenate(pair, axis=1) for pair in zip(self, entries, strict=True)]
        best = np.argsort(-joined[0], axis=1, kind="stable")[:, : self.scores.shape[1]]
        return _Pool(*(np.take_along_axis(values, best, axis=1) for values in joined))

    def ranked(self, photo: int) -> list[tuple[float, int, int]]:
        """`(score, length, slot)` of a photo's finished captions, best first."""
        rows = zip(self.scores[photo], self.lengths[photo], self.slots[photo], strict=True)
        return [(float(score), int(n), int(slot)) for score, n, slot in rows if score > -np.inf]


def _roll_out(
    step: Step,
    state: State,
    count: int,
    choose: Callable[[np.ndarray], np.ndarray],
    limits: _Limits,
) -> list[list[Hypothesis]]:
    """`count` captions per photo, each following one choice per word: `(B, K, V) -> (B, K)`."""
    photos = state[0].shape[0]
    state = _repeat(state, count)
    tokens = np.full((photos, count), limits.start, np.int32)
    totals = np.zeros((photos, count))  # sum of log p
    lengths = np.full((photos, count), limits.max_words)
    finished = np.zeros((photos, count), bool)
    slots = np.broadcast_to(np.arange(count), (photos, count))
    history = _History()
    for words in range(limits.max_words + 1):
        output = step(tokens, state)
        log_probabilities = limits.allowed(output.log_probabilities, words)
        # What has ended ends again, at no cost.
        log_probabilities[finished] = -np.inf
        log_probabilities[finished, limits.end] = 0.0
        last = words == limits.max_words
        if not last and (log_probabilities.max(axis=-1) == -np.inf).any():
            raise ValueError(_NOTHING_ALLOWED)
        tokens = choose(log_probabilities).astype(np.int32)
        chosen = np.take_along_axis(log_probabilities, tokens[:, :, None], axis=2)[:, :, 0]
        ends = (tokens == limits.end) & ~finished
        lengths[ends] = words
        finished |= ends
        if last:
            totals += np.where(ends, chosen, 0.0)
            break
        totals += chosen
        if finished.all():
            break
        history.append(slots, tokens, chosen, output)
        state = output.state

    captions = []
    for photo in range(photos):
        found = [
            history.hypothesis(
                photo,
                slot,
                int(lengths[photo, slot]),
                float(
                    limits.score(totals[photo, slot], lengths[photo, slot] + finished[photo, slot])
                ),
                finished=bool(finished[photo, slot]),
            )
            for slot in range(count)
        ]
        captions.append(sorted(found, key=lambda each: (not each.finished, -each.score)))
    return captions


def _repeat(state: State, count: int) -> State:
    """`(B, 1, ...) -> (B, count, ...)`."""
    return tuple(np.repeat(np.asarray(part), count, axis=1) for part in state)


def _select(state: State, slots: np.ndarray) -> State:
    """Moves the state in slot `slots[b, k]` to slot `k`."""
    photos = np.arange(len(slots))[:, None]
    return tuple(np.asarray(part)[photos, slots] for part in state)


def _top(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's largest values, best first, ties by the lower index.

    For the few that a search keeps, taking the maximum that often is ten times as fast as a
    partition of `(N, M)`, and says which of equal values is taken.

    Returns:
        Their indices and the values, both `(N, count)`. Once a row has nothing left above -inf,
        an index may repeat; its value is then -inf.
    """
    rest = values.copy()
    rows = np.arange(len(values))
    indices = np.empty((len(values), count), np.intp)
    largest = np.empty((len(values), count), values.dtype)
    for place in range(count):
        best = rest.argmax(axis=1)
        indices[:, place] = best
        largest[:, place] = rest[rows, best]
        rest[rows, best] = -np.inf
    return indices, largest


def _keep_top_k(likelihood: np.ndarray, top_k: int) -> np.ndarray:
    """Sets all but the `top_k` largest of the last axis to 0, ties by the lower index."""
    rows = likelihood.reshape(-1, likelihood.shape[-1])
    indices, largest = _top(rows, min(top_k, rows.shape[-1]))
    kept = np.zeros_like(rows)
    np.put_along_axis(kept, indices, largest, axis=1)
    return kept.reshape(likelihood.shape)


def _keep_top_p(likelihood: np.ndarray, top_p: float) -> np.ndarray:
    """Sets to 0 what lies outside the smallest set of words that holds `top_p` of the sum."""
    order = np.argsort(-likelihood, axis=-1, kind="stable")
    ranked = np.take_along_axis(likelihood, order, axis=-1)
    cumulative = ranked.cumsum(axis=-1)
    before = cumulative - ranked
    ranked[before >= top_p * cumulative[..., -1:]] = 0.0
    kept = np.zeros_like(likelihood)
    np.put_along_axis(kept, order, ranked, axis=-1)
    return kept
