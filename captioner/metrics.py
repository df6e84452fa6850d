"""Caption scores on plain strings, by pycocoevalcap, the reference implementation.

Candidates and references are matched by photo id. Scores are fractions as pycocoevalcap returns
them (`bleu_4: 0.243`; CIDEr may exceed 1); only `table` prints the papers' x100. The figures are
BLEU (Papineni et al. 2002), ROUGE-L (Lin 2004), METEOR 1.5 (Denkowski and Lavie 2014) and CIDEr-D
(Vedantam et al. 2015).

Both sides are tokenised alike: as Penn Treebank text, lower-cased, punctuation removed. Papers use
Stanford's tokeniser for that, which needs Java; so does METEOR. Where no Java runs, an equivalent
tokeniser in Python takes its place and METEOR is left out. Unicode is composed first; of scripts
without spaces between words (Chinese, Japanese, Thai) the characters are what is counted, whatever
a model's words are, so that models with and without a segmenter compare: `captioner.text.apart`.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from nltk.tokenize.destructive import NLTKWordTokenizer
from pycocoevalcap.bleu.bleu_scorer import BleuScorer
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.meteor.meteor import Meteor
from pycocoevalcap.rouge.rouge import Rouge
from pycocoevalcap.tokenizer import ptbtokenizer

from captioner.text import apart

__all__ = ["Scores", "Tokenized", "caption_scores", "fast_scores", "table", "tokenize"]

Scores = dict[str, float | int | str | list[str] | None]

_PUNCTUATION = frozenset(ptbtokenizer.PUNCTUATIONS)
_STANFORD_JAR = Path(ptbtokenizer.__file__).with_name(ptbtokenizer.STANFORD_CORENLP_3_4_1_JAR)
_JAVA_SECONDS = 300  # Stanford's tokeniser needs 2 s for 50,000 captions


class Tokenized(NamedTuple):
    """Captions as tokens.

    Attributes:
        captions: each caption's tokens, joined by single spaces, as pycocoevalcap's scorers read
            them; empty where nothing but punctuation was.
        tokenizer: `"ptb-java"` (Stanford's) or `"ptb-python"`.
        note: why it is not Stanford's; `None` if it is.
    """

    captions: list[str]
    tokenizer: str
    note: str | None


def tokenize(texts: Sequence[str]) -> Tokenized:
    """Penn Treebank tokens, lower-cased, without punctuation, by Java where that runs."""
    try:
        return Tokenized(_stanford_tokens(texts), "ptb-java", None)
    except _JavaError as error:
        note = f"{error}: Python tokeniser instead of Stanford's"
        return Tokenized([_python_tokens(text) for text in texts], "ptb-python", note)


def fast_scores(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """The scores to watch while training: `bleu_4` and `cider`, without Java.

    Args:
        candidates: one caption per photo id.
        references: the photos' own captions, by the same ids.

    Raises:
        ValueError: no photos, different ids, or a photo without references.
    """
    _check(candidates, references)
    tokens = [_python_tokens(text) for text in _in_order(candidates, references)]
    hypotheses, truths = _by_photo(tokens, references)
    bleu, _, _ = _bleu(hypotheses, truths)
    return {"bleu_4": bleu[3], "cider": _cider(hypotheses, truths)}


def cider_of_each(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """CIDEr-D of every caption, whose mean is that of all: which are good and which are bad.

    Args:
        candidates: one caption per photo id.
        references: the photos' own captions, by the same ids.

    Raises:
        ValueError: no photos, different ids, or a photo without references.
    """
    _check(candidates, references)
    tokens = [_python_tokens(text) for text in _in_order(candidates, references)]
    hypotheses, truths = _by_photo(tokens, references)
    return dict(zip(truths, map(float, _ciders(hypotheses, truths)), strict=True))


def caption_scores(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> Scores:
    """Every caption score that papers report, and what is needed to compare them.

    Args:
        candidates: one caption per photo id.
        references: the photos' own captions, by the same ids; CIDEr takes its word weights from
            them, so it depends on which photos are scored together.

    Returns:
        `bleu_1` to `bleu_4`: corpus level, closest reference length, no smoothing.
        `bleu_1_no_penalty` to `bleu_4_no_penalty`: without the brevity penalty, as Xu et al. 2015.
        `length_ratio`: tokens of the candidates / of the references closest to them in length;
            `None` where the references have no tokens.
        `rouge_l`, `cider`, `meteor`: `None` where it cannot be computed; a note says why.
        `photos`, `distinct_captions`: counts; captions are the same if their tokens are.
        `mean_words`: tokens per candidate.
        `tokenizer`: `"ptb-java"` or `"ptb-python"`.
        `notes`: list of lines.

    Raises:
        ValueError: no photos, different ids, or a photo without references.
    """
    _check(candidates, references)
    captions, tokenizer, tokenizer_note = tokenize(_in_order(candidates, references))
    hypotheses, truths = _by_photo(captions, references)
    notes = [] if tokenizer_note is None else [tokenizer_note]

    cider: float | None = None
    if len(candidates) > 1:
        cider = _cider(hypotheses, truths)
    else:
        notes.append("no CIDEr: it weighs words by how few of the photos they occur with")
    meteor: float | None = None
    if tokenizer == "ptb-java":
        try:
            meteor = _meteor(hypotheses, truths)
        except _JavaError as error:
            notes.append(f"no METEOR: {error}")
    else:
        notes.append("no METEOR: it needs Java")

    bleu, no_penalty, length_ratio = _bleu(hypotheses, truths)
    texts = [text for (text,) in hypotheses.values()]
    return {
        **{f"bleu_{n}": score for n, score in enumerate(bleu, start=1)},
        **{f"bleu_{n}_no_penalty": score for n, score in enumerate(no_penalty, start=1)},
        "length_ratio": length_ratio,
        "rouge_l": float(Rouge().compute_score(truths, hypotheses)[0]),
        "cider": cider,
        "meteor": meteor,
        "photos": len(texts),
        "distinct_captions": len(set(texts)),
        "mean_words": sum(len(text.split()) for text in texts) / len(texts),
        "tokenizer": tokenizer,
        "notes": notes,
    }


def table(scores: Mapping[str, Any]) -> str:
    """`caption_scores` for people: x100 with one decimal, as papers print them."""
    columns = {
        **{f"BLEU-{n}": f"bleu_{n}" for n in range(1, 5)},
        "METEOR": "meteor",
        "ROUGE-L": "rouge_l",
        "CIDEr": "cider",
    }

    def row(label: str, keys: Sequence[str]) -> str:
        values = (scores.get(key) for key in keys)
        cells = (f"{100 * v:.1f}" if isinstance(v, float) else "-" for v in values)
        return f"{label:<20}" + "".join(f"{cell:>9}" for cell in cells)

    ratio = scores["length_ratio"]
    return "\n".join(
        [
            " " * 20 + "".join(f"{name:>9}" for name in columns),
            row("scores x100", list(columns.values())),
            row("no brevity penalty", [f"bleu_{n}_no_penalty" for n in range(1, 5)]),
            f"{scores['photos']} photos, {scores['distinct_captions']} distinct captions, "
            f"{scores['mean_words']:.1f} words each, length ratio "
            + (f"{ratio:.3f}" if isinstance(ratio, float) else "-")
            + f", tokeniser {scores['tokenizer']}",
            *(f"note: {note}" for note in scores["notes"]),
        ]
    )


def _check(candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> None:
    if not candidates:
        raise ValueError("no photos to score")
    for one, other, lack in (
        (candidates, references, "a candidate but no references"),
        (references, candidates, "references but no candidate"),
    ):
        if missing := sorted(one.keys() - other.keys()):
            raise ValueError(f"{len(missing)} photo(s) with {lack}, the first is {missing[0]!r}")
    for photo, texts in references.items():
        if isinstance(texts, str) or not texts:
            raise ValueError(f"photo {photo!r} needs a sequence of references, got {texts!r}")


def _in_order(candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> list[str]:
    """All texts as one list, which `_by_photo` takes apart: one start of Java serves both."""
    return [text for photo, texts in references.items() for text in (candidates[photo], *texts)]


def _by_photo(
    captions: Sequence[str], references: Mapping[str, Sequence[str]]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Tokens in the order of `_in_order` as pycocoevalcap's `res` and `gts`."""
    rest = iter(captions)
    hypotheses: dict[str, list[str]] = {}
    truths: dict[str, list[str]] = {}
    for photo, texts in references.items():
        hypotheses[photo] = [next(rest)]
        truths[photo] = [next(rest) for _ in texts]
    return hypotheses, truths


def _bleu(
    hypotheses: Mapping[str, list[str]], truths: Mapping[str, list[str]]
) -> tuple[list[float], list[float], float | None]:
    """BLEU-1 to BLEU-4, the same without brevity penalty, and the length ratio."""
    # BleuScorer itself, not pycocoevalcap's Bleu, which keeps the lengths to itself.
    scorer = BleuScorer(n=4)
    for photo, (caption,) in hypotheses.items():
        scorer += (caption, truths[photo])
    scores, _ = scorer.compute_score(option="closest", verbose=0)
    # No caption is shorter than references of length 0, so there is no penalty.
    unpenalised = BleuScorer(n=4, special_reflen=0)
    unpenalised.crefs, unpenalised.ctest = scorer.crefs, scorer.ctest
    no_penalty, _ = unpenalised.compute_score(option="closest", verbose=0)
    reference_length = scorer.reflen(option="closest")
    ratio = scorer.testlen(option="closest") / reference_length if reference_length else None
    return scores, no_penalty, ratio


def _cider(hypotheses: Mapping[str, list[str]], truths: Mapping[str, list[str]]) -> float:
    ciders = _ciders(hypotheses, truths)
    return float(sum(ciders) / len(ciders))


def _ciders(
    hypotheses: Mapping[str, list[str]], truths: Mapping[str, list[str]]
) -> Sequence[float]:
    """Of every photo, in the order of `truths`."""
    if not any(text for texts in truths.values() for text in texts):
        return [0.0] * len(truths)  # pycocoevalcap fails on references without a single token
    each: Sequence[float] = Cider().compute_score(truths, hypotheses)[1]
    return each


class _JavaError(Exception):
    """Java, or a program that it runs, is absent or does not work; the message says which."""


def _require_java() -> None:
    if shutil.which("java") is None:
        raise _JavaError("no Java found")


def _stanford_tokens(texts: Sequence[str]) -> list[str]:
    """The command of pycocoevalcap's PTBTokenizer, which writes into its own package folder.

    Raises:
        _JavaError: Java is absent or fails.
    """
    _require_java()
    command = ["java", "-cp", str(_STANFORD_JAR), "edu.stanford.nlp.process.PTBTokenizer"]
    try:
        completed = subprocess.run(
            [*command, "-preserveLines", "-lowerCase", "-encoding", "utf-8"],
            # One line per caption, whatever line separators are in it.
            input="".join(" ".join(apart(text).split()) + "\n" for text in texts),
            capture_output=True,
            encoding="utf-8",
            timeout=_JAVA_SECONDS,
        )
    except (OSError, UnicodeError, subprocess.SubprocessError) as error:
        raise _JavaError(f"Java's tokeniser failed ({_one_line(error)})") from error
    if completed.returncode:
        complaint = completed.stderr.strip().split("\n")[-1]
        raise _JavaError(f"Java's tokeniser failed ({complaint or completed.returncode})")
    lines = completed.stdout.split("\n")[:-1]
    if len(lines) != len(texts):
        raise _JavaError(f"Java's tokeniser gave {len(lines)} lines for {len(texts)} captions")
    return [_without_punctuation(line.split()) for line in lines]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _meteor(hypotheses: Mapping[str, list[str]], truths: Mapping[str, list[str]]) -> float:
    """METEOR 1.5 by pycocoevalcap, whose Java process is always ended.

    Raises:
        _JavaError: Java is absent or fails.
    """
    _require_java()  # Meteor's destructor fails if its constructor did

    def without_separator(captions: list[str]) -> list[str]:
        """METEOR's protocol separates by `|||`."""
        return [caption.replace("|||", " ") for caption in captions]

    scorer = Meteor()
    try:
        # Leaving the block closes the pipes, which the destructor leaves open.
        with scorer.meteor_p as process:
            try:
                score, _ = scorer.compute_score(
                    {photo: without_separator(texts) for photo, texts in truths.items()},
                    {photo: without_separator(texts) for photo, texts in hypotheses.items()},
                )
            finally:
                process.kill()
    except (OSError, ValueError) as error:  # a broken pipe, or an answer that is no number
        raise _JavaError(f"METEOR's Java program failed ({_one_line(error)})") from error
    finally:
        if scorer.lock.locked():  # left so by a failure; the destructor would wait for it forever
            scorer.lock.release()
    return float(score)


# What follows reproduces Stanford's tokeniser where nltk's, made for the same treebank, differs. Of
# the 55,925 captions of Flickr8k and a part of COCO, 11 come out differently.

_NLTK = NLTKWordTokenizer()
_TYPOGRAPHY = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "–": " -- ", "—": " -- ", "…": " ... "}
)
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
# Words whose full stop belongs to them, wherever they stand.
_ABBREVIATION = re.compile(
    r"(?:[a-hj-z]|[a-z](?:\.[a-z])+"  # not the word I
    r"|mrs?|ms|dr|prof|gen|col|capt|lt|sgt|rev|sen|gov|pres|jr|sr|ph"
    r"|st|ave|blvd|rd|ct|mt|ft|sq|inc|ltd|co|corp|bros|dept|univ|vs|etc|est|tel"
    r"|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mon|tue|wed|thu|fri|calif|fla)\."
)


@lru_cache(maxsize=1 << 17)  # references are the same after every epoch
def _python_tokens(text: str) -> str:
    text = apart(text).lower().translate(_TYPOGRAPHY).strip()
    tokens = _NLTK.tokenize(text)
    # nltk takes the last full stop off whatever word it follows, and leaves all others.
    if tokens[-1:] == ["."] and not text.endswith(" ."):
        tokens[-2:] = ["".join(tokens[-2:])]
    words = []
    for token in tokens:
        if token.endswith(".") and not _ABBREVIATION.fullmatch(token):
            token = token.rstrip(".")
        words.append(_BRACKETS.get(token, token))
    return _without_punctuation(words)


def _without_punctuation(tokens: Sequence[str]) -> str:
    return " ".join(token for token in tokens if token and token not in _PUNCTUATION)
