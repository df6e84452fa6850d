"""Caption scores against pycocoevalcap called directly, nltk, and figures worked out by hand."""

import math
import os
import shutil

import pytest
from nltk.translate.bleu_score import corpus_bleu
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

from captioner import metrics
from captioner.metrics import caption_scores, fast_scores, table, tokenize

needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="no java on PATH: Stanford's tokeniser and METEOR need it"
)

REFERENCES = {
    "dog.jpg": (
        "A brown dog runs through the tall grass .",
        "The dog is running in a field of grass.",
        "A dog runs.",
    ),
    "men.jpg": ("Two men ride bicycles down a city street.", "Men cycling in the city"),
    "girl.jpg": (
        "A little girl in a red dress plays on the beach .",
        'A girl with a "hello" shirt isn\'t swimming; she plays (on sand).',
        "Girl playing on the beach near the water",
        "A young girl in red is on the beach .",
        "A girl plays .",
    ),
}
CANDIDATES = {
    "girl.jpg": "A little girl in a red dress is on the beach.",
    "dog.jpg": "A brown dog runs in the tall grass.",
    "men.jpg": "Two men ride down a city street.",
}
# What the tokenisers must make of the texts above that are not plain words.
TOKENS = {
    'A girl with a "hello" shirt isn\'t swimming; she plays (on sand).': (
        "a girl with a hello shirt is n't swimming she plays -lrb- on sand -rrb-"
    ),
    "The man's t-shirt can't say 1,000 or 3.5, it cannot ...": (
        "the man 's t-shirt ca n't say 1,000 or 3.5 it can not"
    ),
    "“Mr. O'Neill isn’t there” – he’s on Main St.": ("mr. o'neill is n't there he 's on main st."),
    "A dog runs. A cat sits.. the end.": "a dog runs a cat sits the end",
    "It is 5 p.m. in Washington D.C.": "it is 5 p.m. in washington d.c.",
    "[two] {cats} , dogs' toys ; a : b": "-lsb- two -rsb- -lcb- cats -rcb- dogs toys a b",
    "a man\nand his\t dog\u2028run": "a man and his dog run",
    " . ": "",
    "": "",
}
# Where pycocoevalcap makes one word of a Chinese sentence.
OTHER_LANGUAGES = {
    "狗在草地上。穿T恤": "狗 在 草 地 上 穿 t 恤",
    "Un cafe\u0301, l’été «noir»": "un caf\u00e9 l'été noir",
}
TOKENISERS = [
    pytest.param(metrics._python_tokens, id="python"),
    pytest.param(lambda text: metrics._stanford_tokens([text])[0], id="java", marks=needs_java),
]


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def fake_java(monkeypatch, folder, script: str) -> None:
    """Puts a `java` first on PATH that does what `script` says."""
    program = folder / "java"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def tokens_by_photo() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The Python tokens of CANDIDATES and REFERENCES as pycocoevalcap takes them."""
    return (
        {photo: [metrics._python_tokens(text)] for photo, text in CANDIDATES.items()},
        {
            photo: [metrics._python_tokens(each) for each in REFERENCES[photo]]
            for photo in CANDIDATES
        },
    )


@pytest.mark.parametrize("tokenise", TOKENISERS)
@pytest.mark.parametrize("text", {**TOKENS, **OTHER_LANGUAGES})
def test_tokens(tokenise, text):
    assert tokenise(text) == {**TOKENS, **OTHER_LANGUAGES}[text]


@needs_java
def test_java_tokens_are_those_of_pycocoevalcap():
    texts = [
        text for text in TOKENS if "\u2028" not in text
    ]  # which pycocoevalcap takes for a line
    expected = PTBTokenizer().tokenize({"all": [{"caption": text} for text in texts]})["all"]
    tokenised = tokenize(texts)
    assert tokenised == (expected, "ptb-java", None)


@needs_java
@pytest.mark.slow
def test_python_tokens_agree_with_java_on_real_captions(data_root):
    lines = (data_root / "flickr8k" / "Flickr8k.token.txt").read_text("utf-8").splitlines()
    texts = [line.split("\t")[1] for line in lines]
    java, tokenizer, _ = tokenize(texts)
    assert tokenizer == "ptb-java"
    python = [metrics._python_tokens(text) for text in texts]
    different = [pair for pair in zip(java, python, strict=True) if pair[0] != pair[1]]
    assert len(texts) == 40_460
    assert len(different) <= 8, different  # 5 at the time of writing


def test_bleu_and_length_ratio_worked_out_by_hand(no_java):
    scores = caption_scores(
        {"one": "a cat sat here now", "two": "the dog"},
        {"one": ["a cat sat there"], "two": ["the dog runs away", "a big dog ran off to the sea"]},
    )
    # Tokens 5 + 2; the closest references have 4 and 4, so the ratio is 7 / 8.
    assert scores["length_ratio"] == 7 / 8
    penalty = math.exp(1 - 8 / 7)
    # Right words: a, cat, sat; the, dog: 5 of 7. Right pairs: a cat, cat sat; the dog: 3 of 5.
    # Right triples: a cat sat: 1 of 3. Right quadruples: 0 of 2.
    precision = (5 / 7, 3 / 5, 1 / 3)
    for n in (1, 2, 3):
        expected = math.prod(precision[:n]) ** (1 / n)
        assert scores[f"bleu_{n}_no_penalty"] == pytest.approx(expected, abs=1e-6)
        assert scores[f"bleu_{n}"] == pytest.approx(penalty * expected, abs=1e-6)
    assert scores["bleu_4"] == pytest.approx(0, abs=1e-3)
    assert scores["photos"] == scores["distinct_captions"] == 2
    assert scores["mean_words"] == 3.5


def test_no_brevity_penalty_for_long_captions(no_java):
    scores = caption_scores({"one": "a b c d e", "two": "a"}, {"one": ["a b c"], "two": ["a"]})
    assert scores["length_ratio"] == 6 / 4
    assert scores["bleu_1"] == scores["bleu_1_no_penalty"] == pytest.approx(4 / 6)


def test_scores_are_those_of_pycocoevalcap(no_java, capsys):
    scores = caption_scores(CANDIDATES, REFERENCES)
    hypotheses, truths = tokens_by_photo()
    bleu, _ = Bleu(4).compute_score(truths, hypotheses, verbose=0)
    assert [scores[f"bleu_{n}"] for n in range(1, 5)] == bleu
    assert 0.1 < scores["bleu_4"] < 1
    assert scores["cider"] == pytest.approx(Cider().compute_score(truths, hypotheses)[0])
    assert scores["rouge_l"] == pytest.approx(Rouge().compute_score(truths, hypotheses)[0])
    assert fast_scores(CANDIDATES, REFERENCES) == {
        "bleu_4": scores["bleu_4"],
        "cider": pytest.approx(scores["cider"]),
    }
    assert capsys.readouterr() == ("", "")


def test_bleu_is_that_of_nltk(no_java):
    scores = caption_scores(CANDIDATES, REFERENCES)
    hypotheses, truths = tokens_by_photo()
    for n in range(1, 5):
        expected = corpus_bleu(
            [[text.split() for text in texts] for texts in truths.values()],
            [text.split() for (text,) in hypotheses.values()],
            weights=(1 / n,) * n,
        )
        assert scores[f"bleu_{n}"] == pytest.approx(expected, abs=1e-6)


def test_perfect_captions(no_java):
    candidates = {photo: texts[0] for photo, texts in REFERENCES.items()}
    scores = caption_scores(candidates, REFERENCES)
    for n in range(1, 5):
        assert scores[f"bleu_{n}"] == pytest.approx(1)
        assert scores[f"bleu_{n}_no_penalty"] == pytest.approx(1)
    assert scores["rouge_l"] == pytest.approx(1)
    assert scores["length_ratio"] == 1


def test_the_order_of_photos_does_not_matter(no_java):
    backwards = caption_scores(CANDIDATES, dict(reversed(REFERENCES.items())))
    for name, value in caption_scores(CANDIDATES, REFERENCES).items():
        expected = pytest.approx(value) if isinstance(value, float) else value
        assert backwards[name] == expected, name


def test_one_photo_has_no_cider(no_java):
    scores = caption_scores({"dog.jpg": "a dog"}, {"dog.jpg": REFERENCES["dog.jpg"]})
    assert scores["cider"] is None
    assert any("CIDEr" in note for note in scores["notes"])
    assert fast_scores({"dog.jpg": "a dog"}, {"dog.jpg": REFERENCES["dog.jpg"]})["cider"] == 0


def test_without_java_there_is_no_meteor(no_java):
    scores = caption_scores(CANDIDATES, REFERENCES)
    assert scores["meteor"] is None
    assert scores["tokenizer"] == "ptb-python"
    assert scores["notes"] == [
        "no Java found: Python tokeniser instead of Stanford's",
        "no METEOR: it needs Java",
    ]


@needs_java
@pytest.mark.slow
def test_with_java(capsys):
    scores = caption_scores(CANDIDATES, REFERENCES)
    assert scores["tokenizer"] == "ptb-java"
    assert scores["notes"] == []
    hypotheses, truths = tokens_by_photo()
    scorer = Meteor()
    with scorer.meteor_p as process:
        expected, _ = scorer.compute_score(truths, hypotheses)
        process.kill()
    assert scores["meteor"] == pytest.approx(expected)
    assert 0.2 < expected < 0.9
    assert capsys.readouterr() == ("", "")


@needs_java
@pytest.mark.slow
def test_empty_captions_and_separators_do_not_upset_meteor():
    references = {"one": ["a dog ||| runs", "a dog"], "two": ["", "two men"], "three": ["a cat"]}
    candidates = {"one": "a ||| dog", "two": "two men", "three": ""}
    scores = caption_scores(candidates, references)
    assert scores["notes"] == []
    assert 0 < scores["meteor"] < 1
    candidates["three"] = "a cat"
    assert caption_scores(candidates, references)["meteor"] > scores["meteor"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'no runtime' >&2; exit 1", "Java's tokeniser failed (no runtime): Python tokeniser"),
        ("cat >/dev/null; echo one line", "Java's tokeniser gave 1 lines for 13 captions"),
    ],
)
def test_a_java_that_does_not_work_is_no_java(monkeypatch, tmp_path, script, reason):
    fake_java(monkeypatch, tmp_path, script)
    scores = caption_scores(CANDIDATES, REFERENCES)
    assert scores["meteor"] is None
    assert scores["tokenizer"] == "ptb-python"
    assert scores["notes"][0].startswith(reason)
    assert scores["notes"][1] == "no METEOR: it needs Java"


@needs_java
@pytest.mark.parametrize("failure", ["exit 1", "while read line; do echo what; done"])
def test_a_meteor_that_fails_leaves_the_other_scores(monkeypatch, tmp_path, failure):
    java = shutil.which("java")
    fake_java(monkeypatch, tmp_path, f'case "$1" in -cp) exec {java} "$@";; esac\n{failure}')
    scores = caption_scores(CANDIDATES, REFERENCES)
    assert scores["tokenizer"] == "ptb-java"
    assert scores["meteor"] is None
    assert scores["notes"][0].startswith("no METEOR: METEOR's Java program failed")
    assert scores["bleu_4"] > 0.1


def test_empty_candidates_score_nothing(no_java):
    scores = caption_scores(dict.fromkeys(REFERENCES, " . "), REFERENCES)
    for name in ("bleu_1", "bleu_4", "bleu_4_no_penalty", "rouge_l", "cider", "mean_words"):
        assert scores[name] == pytest.approx(0, abs=1e-6), name
    assert scores["length_ratio"] == 0
    assert scores["distinct_captions"] == 1


def test_references_without_a_word_do_not_crash(no_java):
    scores = caption_scores({"one": "a dog", "two": "a cat"}, {"one": ["."], "two": [""]})
    assert scores["length_ratio"] is None
    assert scores["cider"] == scores["rouge_l"] == 0
    assert "length ratio -" in table(scores)


@pytest.mark.parametrize("score", [fast_scores, caption_scores])
@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ({}, {}, "no photos to score"),
        ({"a": "x", "b": "x"}, {"a": ["x"]}, "1 photo.s. with a candidate but no references.* 'b'"),
        ({"a": "x"}, {"a": ["x"], "c": ["x"]}, "1 photo.s. with references but no candidate.* 'c'"),
        ({"a": "x"}, {"a": []}, r"photo 'a' needs a sequence of references, got \[\]"),
        ({"a": "x"}, {"a": "x"}, "photo 'a' needs a sequence of references, got 'x'"),
    ],
)
def test_what_cannot_be_scored_is_named(score, candidates, references, message):
    with pytest.raises(ValueError, match=message):
        score(candidates, references)


def test_table():
    scores = {
        **{f"bleu_{n}": n / 10 for n in range(1, 5)},
        **{f"bleu_{n}_no_penalty": n / 10 + 0.011 for n in range(1, 5)},
        "length_ratio": 0.9876,
        "rouge_l": 0.473,
        "cider": 0.5554,
        "meteor": None,
        "photos": 1000,
        "distinct_captions": 865,
        "mean_words": 9.87,
        "tokenizer": "ptb-python",
        "notes": ["no METEOR: it needs Java"],
    }
    assert [" ".join(line.split()) for line in table(scores).splitlines()] == [
        "BLEU-1 BLEU-2 BLEU-3 BLEU-4 METEOR ROUGE-L CIDEr",
        "scores x100 10.0 20.0 30.0 40.0 - 47.3 55.5",
        "no brevity penalty 11.1 21.1 31.1 41.1",
        "1000 photos, 865 distinct captions, 9.9 words each, length ratio 0.988, "
        "tokeniser ptb-python",
        "note: no METEOR: it needs Java",
    ]


def test_cider_of_each_has_the_mean_of_all(no_java):
    references = {"1": ("a dog runs", "the dog runs fast"), "2": ("a cat sits",), "3": ("a car",)}
    captions = {"1": "a dog runs", "2": "a bird flies", "3": "a red car"}
    each = metrics.cider_of_each(captions, references)
    assert list(each) == ["1", "2", "3"]
    assert each["1"] > each["3"] > each["2"] >= 0
    mean = sum(each.values()) / 3
    assert mean == pytest.approx(metrics.fast_scores(captions, references)["cider"])
    assert metrics.cider_of_each({"1": "a"}, {"1": ("",)}) == {"1": 0.0}
