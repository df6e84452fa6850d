"""The searches against fake models whose answers are known by hand or by trying everything."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from captioner import search as searches
from captioner.errors import InputError
from captioner.search import Hypothesis, Step, StepOutput, length_rule

PAD, START, END = 0, 1, 2  # the words are 3, 4, ...
LIMITS = {"start": START, "end": END, "banned": (PAD, START)}


def runs(search: Callable[..., searches.Found]) -> Callable[..., list[list[Hypothesis]]]:
    """A search over a step in numpy, up to what it found; maps are as wide as the vocabulary."""

    def run(step, state, **options):
        regions = getattr(step, "regions", None)

        def in_numpy(tokens, state, memory):
            return step(tokens.numpy(), tuple(np.asarray(part) for part in state))

        found = search(in_numpy, state, regions=regions, **options)
        return searches.hypotheses(found)

    return run


greedy, sample, beam = runs(searches.greedy), runs(searches.sample), runs(searches.beam)
SEARCHES = {
    "greedy": greedy,
    "sample": lambda *args, **kwargs: sample(*args, **{"count": 3, **kwargs}),
    "beam": lambda *args, **kwargs: beam(*args, **{"beam": 3, **kwargs}),
}


def log_table(table: np.ndarray) -> np.ndarray:
    """Log of `(..., V)` weights, each row normalised."""
    table = np.asarray(table, np.float64)
    with np.errstate(divide="ignore"):
        return np.log(table / table.sum(axis=-1, keepdims=True)).astype(np.float32)


def random_tables(photos: int, vocabulary: int, seed: int) -> np.ndarray:
    """A Markov chain of the second order per photo: `(B, V, V, V)`, log p(next | two previous)."""
    generator = np.random.default_rng(seed)
    return log_table(generator.gamma(0.5, size=(photos,) + (vocabulary,) * 3) + 1e-3)


def markov(tables: np.ndarray) -> tuple[Step, tuple[np.ndarray, ...]]:
    """The step and initial state of `random_tables`.

    The state is the photo's number, the last token but one and the number of words so far; all
    must follow the beams for the answers to be right. The map has its mass 1 on the previous
    token and the gate is the token before that, so both tell which beam they were made for.
    """
    photos, vocabulary = tables.shape[:2]

    def step(tokens, state):
        photo, previous, words = state
        assert tokens.dtype == np.int32
        assert tokens.shape == photo.shape == previous.shape == words.shape
        assert len(np.unique(words)) == 1
        return StepOutput(
            log_probabilities=tables[photo, previous, tokens],
            state=(photo, tokens, words + 1),
            attention=np.eye(vocabulary, dtype=np.float32)[tokens],
            gate=previous.astype(np.float32),
        )

    step.regions = vocabulary
    start = np.full((photos, 1), START)
    return step, (np.arange(photos)[:, None], start, np.zeros_like(start))


def fixed(probabilities: list[list[float]]) -> tuple[Step, tuple[np.ndarray, ...]]:
    """One photo whose next word depends on the previous only: `V` rows of `V` weights."""
    table = log_table(probabilities)

    def step(tokens, state):
        return StepOutput(table[tokens], state, None, None)

    return step, (np.zeros((1, 1)),)


def everything(
    table: np.ndarray, max_words: int, min_words: int, length_penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """All finished captions of one photo's `(V, V, V)` table, best first, as (score, tokens)."""
    found = []
    for length in range(min_words, max_words + 1):
        for words in itertools.product(range(3, len(table)), repeat=length):
            tokens = (START, START, *words, END)
            total = sum(
                float(table[tokens[i - 2], tokens[i - 1], tokens[i]]) for i in range(2, len(tokens))
            )
            found.append((total / (length + 1) ** length_penalty, words))
    return sorted(found, reverse=True)


def same(one: Hypothesis, other: Hypothesis) -> None:
    assert one.tokens == other.tokens
    assert one.finished == other.finished
    assert one.score == pytest.approx(other.score, abs=1e-12)
    for name in ("log_probabilities", "attention", "gate"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# Greedy takes word 3 (0.6), after which nothing is likely; word 4 leads to a certain end.
GARDEN_PATH = [
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0.6, 0.4],
    [1, 0, 0, 0, 0],
    [0, 0, 0.3, 0.4, 0.3],
    [0, 0, 1, 0, 0],
]


def test_greedy_is_misled_where_beam_is_not():
    step, state = fixed(GARDEN_PATH)
    [[first]] = greedy(step, state, **LIMITS, max_words=2, length_penalty=0.0)
    assert first.tokens == (3, 3)
    assert first.finished is False
    assert first.score == pytest.approx(math.log(0.6 * 0.4))
    [[best, second]] = beam(
        step, state, **LIMITS, max_words=2, beam=2, n_best=2, length_penalty=0.0
    )
    assert best.tokens == (4,)
    assert best.finished is True
    assert best.score == pytest.approx(math.log(0.4))
    np.testing.assert_allclose(best.log_probabilities, [math.log(0.4)], rtol=1e-6)
    assert second.tokens in {(3,), (3, 4)}  # 0.6 * 0.3, and 0.6 * 0.3 * 1
    assert second.score == pytest.approx(math.log(0.18))


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("min_words", [1, 3])
def test_a_beam_wide_enough_finds_what_trying_everything_finds(length_penalty, min_words):
    tables = random_tables(photos=7, vocabulary=6, seed=11)
    step, state = markov(tables)
    # 3 words (6 tokens but pad, start and end) make 81 captions of 4 words: none is lost.
    found = beam(
        step,
        state,
        **LIMITS,
        max_words=4,
        min_words=min_words,
        beam=81,
        n_best=13,
        length_penalty=length_penalty,
    )
    for photo, hypotheses in enumerate(found):
        expected = everything(tables[photo], 4, min_words, length_penalty)[:13]
        assert [each.tokens for each in hypotheses] == [tokens for _, tokens in expected]
        np.testing.assert_allclose(
            [each.score for each in hypotheses], [score for score, _ in expected], atol=1e-5
        )
        assert all(each.finished for each in hypotheses)


def repeats(tokens: tuple[int, ...], n: int) -> bool:
    """Whether n words in a row stand there twice."""
    rows = [tokens[first : first + n] for first in range(len(tokens) - n + 1)]
    return len(set(rows)) < len(rows)


@pytest.mark.parametrize("no_repeat", [2, 3])
def test_without_repeats_all_others_are_found(no_repeat):
    tables = random_tables(photos=5, vocabulary=5, seed=37)
    step, state = markov(tables)
    # 2 words make 62 captions of up to 5 words: none is lost.
    found = beam(
        step, state, **LIMITS, max_words=5, beam=32, n_best=11, length_penalty=0.7,
        no_repeat=no_repeat,
    )  # fmt: skip
    for photo, hypotheses in enumerate(found):
        expected = [
            one for one in everything(tables[photo], 5, 1, 0.7) if not repeats(one[1], no_repeat)
        ]
        assert [each.tokens for each in hypotheses] == [tokens for _, tokens in expected[:11]]


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_nothing_stands_there_twice(search):
    tables = random_tables(photos=11, vocabulary=6, seed=5)
    tables[..., END] = -7.0  # long captions
    step, state = markov(tables)
    options = {**LIMITS, "max_words": 9}
    free = [one.tokens for photo in search(step, state, **options) for one in photo]
    assert any(repeats(tokens, 2) for tokens in free)
    bound = search(step, state, **options, no_repeat=2)
    assert not any(repeats(one.tokens, 2) for photo in bound for one in photo)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 2.0])
def test_stopping_early_changes_no_answer(length_penalty):
    tables = random_tables(photos=13, vocabulary=7, seed=3)
    step, state = markov(tables)
    calls = []

    def counted(tokens, state):
        calls.append(tokens.shape)
        return step(tokens, state)

    counted.regions = step.regions

    options = {**LIMITS, "beam": 5, "n_best": 2, "length_penalty": length_penalty}
    found = beam(counted, state, **options, max_words=17)
    # The 14th photo can neither end nor repeat a finished one, so the search goes on to the end.
    endless = np.full((1, 7, 7, 7), 1.0)
    endless[..., END] = 0.0
    step, state = markov(np.concatenate([tables, log_table(endless)]))
    full = beam(step, state, **options, max_words=17)
    for one, other in zip(found, full, strict=False):
        for hypothesis, expected in zip(one, other, strict=True):
            same(hypothesis, expected)
    rows = [photos for photos, _ in calls]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 13
    if length_penalty < 1:
        assert sum(rows) < 13 * 18  # photos that are done are left out


@pytest.mark.parametrize("no_repeat", [0, 3])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_graph_finds_what_steps_find(name, no_repeat):
    tables = random_tables(photos=11, vocabulary=7, seed=29)
    options = {**LIMITS, "max_words": 13, "no_repeat": no_repeat}
    options |= {"sample": {"count": 3}, "beam": {"beam": 3, "n_best": 2}}.get(name, {})
    search = getattr(searches, name)
    expected = runs(search)(*markov(tables), **options)

    @tf.function(input_signature=[tf.TensorSpec((None, 7, 7, 7))], autograph=False)
    def graph(tables):
        def step(tokens, state, memory):
            previous, words = state
            (table,) = memory
            index = tf.stack([previous, tokens], axis=-1)
            return StepOutput(
                tf.gather_nd(table, index, batch_dims=1),
                (tokens, words + 1),
                tf.one_hot(tokens, 7),
                tf.cast(previous, tf.float32),
            )

        start = tf.fill((tf.shape(tables)[0], 1), START)
        return search(step, (start, tf.zeros_like(start)), (tables,), 7, **options)

    for photos in (11, 5):
        found = searches.hypotheses(graph(tables[:photos]))
        assert len(found) == photos
        if name == "sample" and photos < 11:
            continue  # fewer photos, other draws
        for one, other in zip(found, expected, strict=False):
            for hypothesis, its_twin in zip(one, other, strict=True):
                same(hypothesis, its_twin)


def test_stops_as_soon_as_nothing_can_improve():
    step, state = fixed([[1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0.8, 0.2]])
    calls = []

    def counted(tokens, state):
        calls.append(tokens)
        return step(tokens, state)

    options = {**LIMITS, "max_words": 19, "beam": 2}
    [[best]] = beam(counted, state, **options, length_penalty=0.0)
    assert best.tokens == (3,)
    assert len(calls) == 2  # the word, its end
    calls.clear()
    # Ending after a word scores log 0.8 / 2 = -0.112. A second word might at best bring it to
    # log 0.2 / 20 = -0.080, a third to log 0.04 / 20 = -0.161.
    beam(counted, state, **options, length_penalty=1.0)
    assert len(calls) == 3


def test_endings_do_not_take_the_place_of_live_beams():
    # Both beams are likelier to end than to go on, but the length rule prefers long captions.
    goes_on = [0, 0, 0.5, 0.26, 0.24]
    step, state = fixed([[1] * 5, [0, 0, 0, 1, 1], [1] * 5, goes_on, goes_on])
    [[best]] = beam(step, state, **LIMITS, max_words=7, beam=2, length_penalty=2.0)
    assert best.tokens == (3,) * 7
    assert best.finished is True


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_no_caption_ever_ends(search):
    step, state = fixed([[1] * 5, [0, 0, 0, 2, 1], [1] * 5, [0, 0, 0, 1, 2], [0, 0, 0, 2, 1]])
    [hypotheses] = search(step, state, **LIMITS, max_words=7)
    for each in hypotheses:
        assert len(each.tokens) == len(each.log_probabilities) == 7
        assert each.finished is False
        assert each.score == pytest.approx(each.log_probabilities.sum() / 7**0.7)
    if search is not SEARCHES["sample"]:
        assert hypotheses[0].tokens == (3, 4, 3, 4, 3, 4, 3)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_every_caption_ends_at_once(search):
    step, state = fixed([[1] * 5, [0, 0, 0, 2, 1], [1] * 5, [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]])
    [hypotheses] = search(step, state, **LIMITS, max_words=7)
    for each in hypotheses:
        assert each.tokens in {(3,), (4,)}
        assert each.finished is True
        # The end token costs nothing here, but counts.
        assert each.score == pytest.approx(each.log_probabilities[0] / 2**0.7)
    if search is not SEARCHES["sample"]:
        assert hypotheses[0].tokens == (3,)


def test_finished_rank_before_unfinished_whatever_their_scores():
    # The only way to end is unlikely; going on for ever is nearly certain.
    step, state = fixed([[1] * 4, [0, 0, 0, 1], [1] * 4, [0, 0, 0.01, 0.99]])
    [found] = beam(step, state, **LIMITS, max_words=2, beam=3, n_best=3)
    assert [each.finished for each in found] == [True, True, False]
    assert [each.tokens for each in found] == [(3, 3), (3,), (3, 3)]
    assert found[2].score > found[0].score


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_banned_words_and_an_early_end_are_never_chosen(search):
    # The model wants pads, start tokens, word 3, or to end; 4 and 5 are what it may say.
    step, state = fixed([[30, 30, 20, 18, 1, 1]] * 6)
    found = search(
        step, state, start=START, end=END, banned=(PAD, START, 3), max_words=11, min_words=5
    )
    for each in found[0]:
        assert set(each.tokens) <= {4, 5}
        assert len(each.tokens) >= 5
        # The model's own probabilities, as if nothing were banned.
        np.testing.assert_allclose(each.log_probabilities, math.log(0.01), rtol=1e-6)
        total = len(each.tokens) * math.log(0.01) + each.finished * math.log(0.2)
        assert each.score == pytest.approx(total / (len(each.tokens) + each.finished) ** 0.7)
    if search is not SEARCHES["sample"]:
        assert found[0][0].tokens == (4, 4, 4, 4, 4)  # equal scores: the lower token


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_maps_and_gates_belong_to_the_words_that_used_them(search):
    step, state = markov(random_tables(photos=5, vocabulary=11, seed=2))
    found = search(step, state, **LIMITS, max_words=7, min_words=4)
    assert len({each.tokens for hypotheses in found for each in hypotheses}) >= 5
    for hypotheses in found:
        for each in hypotheses:
            before = (START, START, *each.tokens)
            length = len(each.tokens)
            assert each.attention.shape == (length, 11)
            assert tuple(each.attention.argmax(axis=1)) == before[1 : length + 1]
            assert tuple(each.gate) == before[:length]


@pytest.mark.parametrize("search", [greedy, beam])
def test_a_photo_is_described_the_same_alone_or_in_a_batch(search):
    tables = random_tables(photos=7, vocabulary=11, seed=5)
    together = search(*markov(tables), **LIMITS, max_words=13)
    for photo in range(7):
        [[alone]] = search(*markov(tables[photo : photo + 1]), **LIMITS, max_words=13)
        same(alone, together[photo][0])


def test_log_probabilities_are_those_of_the_words():
    tables = random_tables(photos=5, vocabulary=11, seed=7)
    for [each], table in zip(beam(*markov(tables), **LIMITS, max_words=13), tables, strict=True):
        tokens = (START, START, *each.tokens, END)
        expected = [table[tokens[i - 2], tokens[i - 1], tokens[i]] for i in range(2, len(tokens))]
        np.testing.assert_allclose(each.log_probabilities, expected[: len(each.tokens)])
        assert each.log_probabilities.dtype == np.float64
        assert each.score == pytest.approx(sum(expected) / len(expected) ** 0.7, rel=1e-5)


@pytest.mark.parametrize("length_penalty", [0.0, 0.7])
def test_a_beam_of_one_is_greedy(length_penalty):
    options = {**LIMITS, "max_words": 13, "min_words": 2, "length_penalty": length_penalty}
    tables = random_tables(photos=17, vocabulary=7, seed=13)
    narrow = beam(*markov(tables), **options, beam=1)
    for [one], [other] in zip(narrow, greedy(*markov(tables), **options), strict=True):
        same(one, other)


def test_greedy_takes_the_likeliest_word():
    tables = random_tables(photos=5, vocabulary=7, seed=17)
    for table, [each] in zip(tables, greedy(*markov(tables), **LIMITS, max_words=5), strict=True):
        tokens = [START, START]
        while tokens[-1] != END and len(tokens) < 7:
            allowed = range(END if len(tokens) > 2 else END + 1, 7)
            likelihood = table[tokens[-2], tokens[-1]]
            tokens.append(max(allowed, key=likelihood.__getitem__))
        assert each.tokens == tuple(token for token in tokens[2:] if token != END)


@pytest.mark.parametrize("width", [5, 23])
def test_n_best_are_different_and_in_order_even_with_more_beams_than_words(width):
    step, state = markov(random_tables(photos=3, vocabulary=5, seed=19))
    for hypotheses in beam(step, state, **LIMITS, max_words=7, beam=width, n_best=5):
        assert len({each.tokens for each in hypotheses}) == len(hypotheses) == 5
        scores = [each.score for each in hypotheses]
        assert scores == sorted(scores, reverse=True)


def test_fewer_captions_exist_than_are_asked_for():
    step, state = fixed([[1] * 4, [0, 0, 0, 1], [1] * 4, [0, 0, 1, 0]])
    [found] = beam(step, state, **LIMITS, max_words=5, beam=3, n_best=3)
    assert [each.tokens for each in found] == [(3,)]


def test_equal_scores_rank_by_token():
    step, state = fixed([[1] * 13, [0, 0, 0] + [1] * 10, *[[0, 0, 1] + [0] * 10] * 11])
    [found] = beam(step, state, **LIMITS, max_words=3, beam=5, n_best=5)
    assert [each.tokens for each in found] == [(3,), (4,), (5,), (6,), (7,)]


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_photo_that_is_done_does_not_hold_up_or_disturb_the_others(search):
    ends = np.zeros((5, 5, 5))
    ends[..., 3], ends[:, 3] = 1, [0, 0, 1, 0, 0]
    goes_on = np.zeros((5, 5, 5))
    goes_on[..., 4] = 1
    [short, long] = search(*markov(log_table(np.stack([ends, goes_on]))), **LIMITS, max_words=7)
    assert {each.tokens for each in short} == {(3,)}
    assert {each.tokens for each in long} == {(4,) * 7}


def draws(count: int = 20_000, **options) -> np.ndarray:
    """How often each of the 5 tokens after the certain first word 3 was drawn, as shares."""
    weights = [0.0, 0.0, 0.1, 0.2, 0.3, 0.4]
    step, state = fixed([[1] * 6, [0, 0, 0, 1, 0, 0], [1] * 6, weights, weights, weights])
    [found] = sample(step, state, **LIMITS, max_words=2, count=count, seed=29, **options)
    assert len(found) == count
    tokens = [each.tokens[1] if len(each.tokens) > 1 else END for each in found]
    return np.bincount(tokens, minlength=6) / count


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [0.01, 0.04, 0.09, 0.16]),
        ({"temperature": 2.0}, [0.1**0.5, 0.2**0.5, 0.3**0.5, 0.4**0.5]),
        ({"temperature": 1e-9}, [0, 0, 0, 1]),
        ({"top_k": 2}, [0, 0, 0.3, 0.4]),
        ({"top_k": 1}, [0, 0, 0, 1]),
        ({"top_k": 1000}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_p": 0.69}, [0, 0, 0.3, 0.4]),
        ({"top_p": 0.71}, [0, 0.2, 0.3, 0.4]),
        ({"top_p": 0.01}, [0, 0, 0, 1]),
        # 0.4 of the 0.7 that top_k leaves is 0.57: enough alone for 0.5, not for 0.6.
        ({"top_k": 2, "top_p": 0.5}, [0, 0, 0, 1]),
        ({"top_k": 2, "top_p": 0.6}, [0, 0, 0.3, 0.4]),
    ],
)
def test_words_are_drawn_as_often_as_they_should(options, weights):
    shares = draws(**options)
    expected = np.array(weights) / np.sum(weights)
    assert shares[:2].sum() == 0
    # Five standard deviations; what cannot be drawn must not be.
    tolerance = 5 * np.sqrt(expected * (1 - expected) / 20_000)
    assert (np.abs(shares[2:] - expected) <= tolerance).all(), shares


def test_the_seed_decides_what_is_drawn():
    step, state = markov(random_tables(photos=3, vocabulary=11, seed=23))

    def tokens(seed):
        found = sample(step, state, **LIMITS, max_words=7, count=5, seed=seed)
        return [[each.tokens for each in hypotheses] for hypotheses in found]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_samples_come_best_first():
    step, state = markov(random_tables(photos=3, vocabulary=11, seed=31))
    for hypotheses in sample(step, state, **LIMITS, max_words=5, count=13):
        ranks = [(each.finished, each.score) for each in hypotheses]
        assert ranks == sorted(ranks, reverse=True)
        assert len(set(ranks)) > 1


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (beam, {"beam": 0}, "beam is 0: it must be at least 1"),
        (beam, {"beam": 3, "n_best": 4}, "n_best is 4: it must be from 1 to the beam size, 3"),
        (beam, {"n_best": 0}, "n_best is 0: it must be from 1 to the beam size, 5"),
        (beam, {"length_penalty": -1.0}, "length_penalty is -1.0: it must be at least 0"),
        (greedy, {"max_words": 0}, "max_words is 0: it must be at least 1"),
        (greedy, {"min_words": 0}, "min_words is 0: it must be from 1 to max_words, 3"),
        (greedy, {"min_words": 4}, "min_words is 4: it must be from 1 to max_words, 3"),
        (greedy, {"no_repeat": 1}, "no_repeat is 1: it must be 0, or 2 or more"),
        (sample, {"temperature": 0.0}, "temperature is 0.0: it must be above 0"),
        (sample, {"temperature": math.nan}, "temperature is nan: it must be above 0"),
        (sample, {"top_k": 0}, "top_k is 0: it must be at least 1"),
        (sample, {"top_p": 0.0}, "top_p is 0.0: it must be above 0 and at most 1"),
        (sample, {"top_p": 1.1}, "top_p is 1.1: it must be above 0 and at most 1"),
        (sample, {"count": 0}, "count is 0: it must be at least 1"),
        (sample, {"seed": -1}, "seed is -1: it must be at least 0"),
    ],
)
def test_options_out_of_range_are_named(search, options, message):
    step, state = fixed(GARDEN_PATH)
    with pytest.raises(InputError) as error:
        search(step, state, **{**LIMITS, "max_words": 3, **options})
    assert str(error.value) == message


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_broken_model_is_not_searched(search):
    _, state = fixed(GARDEN_PATH)

    def gives(value):
        def step(tokens, state):
            return StepOutput(np.full((*tokens.shape, 5), value), state, None, None)

        return step

    with pytest.raises(ValueError, match="NaN log probabilities after 0 words"):
        search(gives(np.nan), state, **LIMITS, max_words=3)
    with pytest.raises(ValueError, match="every allowed next word probability 0"):
        search(gives(-np.inf), state, **LIMITS, max_words=3)
    with pytest.raises(ValueError, match="end token 2 is banned"):
        search(gives(0.0), state, start=START, end=END, banned=(PAD, END), max_words=3)


def test_the_length_rule_in_words():
    assert length_rule(0.0).endswith("not normalised by length")
    assert length_rule(0.7).endswith("/ (number of tokens, end included) ** 0.7")
