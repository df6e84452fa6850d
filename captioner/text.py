"""Captions as words: normalising, tokenising, and the vocabulary that numbers the words."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import regex

from captioner.errors import InputError

__all__ = [
    "CLITICS",
    "END",
    "NEVER_WRITTEN",
    "PAD",
    "SPECIAL_TOKENS",
    "START",
    "UNKNOWN",
    "Vocabulary",
    "apart",
    "join",
    "joins_next",
    "joins_previous",
    "tokenize",
]

PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<start>", "<end>", "<unk>")
NEVER_WRITTEN = (PAD, START, UNKNOWN)  # what a caption that is written freely does not contain

# Tokens that the captioning literature drops before counting or scoring words: the list of
# coco-caption's PTBTokenizer, in the form nltk's tokeniser writes them.
_PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "(", ")", "{", "}", "[", "]", ".", "?", "!", ",", ":", ";"]
    + ["-", "--", "...", '"', "‘"]
)
# What the tokeniser splits off a word belongs to it again in a sentence: "man 's" -> "man's".
CLITICS = frozenset(["'s", "'re", "'ve", "'ll", "'d", "'m", "n't", "'"])

# Scripts that put no spaces between words. Without a segmenter each of their characters is a word.
_UNSPACED_SCRIPTS = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_UNSPACED = regex.compile(f"[{_UNSPACED_SCRIPTS}]")
_HAN = regex.compile(r"\p{Han}+")
# Emoji, too, stand for themselves. A character comes with all that modifies it: \X.
_ALONE = regex.compile(
    rf"(?=[{_UNSPACED_SCRIPTS}\p{{Extended_Pictographic}}\p{{Regional_Indicator}}])\X"
)
# Beyond ASCII, whose punctuation is the tokeniser's affair; but for what stands inside words, as in
# "col·lecció" and "צה״ל".
_PUNCTUATION_BEYOND_ASCII = regex.compile(r"(?V1)[\p{P}--[\x00-\x7f]--[·‧‐‑׳״་‘]]")


@cache
def _word_tokenizer():  # type: ignore[no-untyped-def]  # nltk has no types
    # Imported late: nltk costs a quarter of a second that captioning a photo does not need.
    # NLTKWordTokenizer is regular expressions only; unlike `word_tokenize` it needs no download.
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


@cache
def _jieba() -> Callable[[str], list[str]]:
    """Cuts a run of Chinese characters into words."""
    try:
        import jieba
    except ImportError as error:
        raise InputError(
            "Chinese words need jieba: pip install jieba, or train without --segmenter jieba, "
            "where every character is a word"
        ) from error
    jieba.setLogLevel("WARNING")  # it tells how long it loads
    return jieba.lcut


def apart(text: str) -> str:
    """Text with spaces where words are to be split that no space separates.

    Unicode is composed (NFC) and typographic apostrophes become ASCII ones, so that one word has
    one spelling. Other punctuation beyond ASCII becomes space; characters of scripts without spaces
    between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese) stand alone, and so do emoji.

    >>> apart("¿Un café? 狗🐶。").split()
    ['Un', 'café?', '狗', '🐶']
    """
    text = unicodedata.normalize("NFC", text).replace("’", "'")
    if text.isascii():
        return text
    return _ALONE.sub(r" \g<0> ", _PUNCTUATION_BEYOND_ASCII.sub(" ", text))


def tokenize(caption: str, segmenter: str = "none") -> list[str]:
    """Lower-case words of a caption in any language, without punctuation.

    Words are what spaces separate or, where a script has none, single characters: see `apart`.
    English clitics are split off as in the Penn Treebank and the reference scorers.

    Args:
        caption: the text.
        segmenter: `none`, or `jieba` to cut Chinese into words.

    Raises:
        InputError: jieba is wanted and not installed.

    >>> tokenize("A man's dog doesn’t jump .")
    ['a', 'man', "'s", 'dog', 'does', "n't", 'jump']
    >>> tokenize("狗在草地上。", "jieba")
    ['狗', '在', '草地', '上']
    """
    if segmenter == "jieba":
        caption, words, place = unicodedata.normalize("NFC", caption), [], 0
        for run in _HAN.finditer(caption):
            words += [*tokenize(caption[place : run.start()]), *_jieba()(run[0])]
            place = run.end()
        return words + tokenize(caption[place:])
    text = apart(caption).lower()
    return [word for word in _word_tokenizer().tokenize(text) if word not in _PUNCTUATION]


def joins_previous(word: str) -> bool:
    """Whether no space stands before a word: clitics, and scripts without spaces."""
    return word in CLITICS or joins_next(word)


def joins_next(word: str) -> bool:
    """Whether no space stands after a word."""
    return _UNSPACED.search(word) is not None


def join(words: Iterable[str]) -> str:
    """The words as one line of text: the inverse of `tokenize` but for case and punctuation.

    >>> join(["a", "man", "'s", "dog"])
    "a man's dog"
    >>> join(["草地", "上", "的", "狗"])
    '草地上的狗'
    """
    text, joined = "", True
    for word in words:
        text += word if joined or joins_previous(word) else " " + word
        joined = joins_next(word)
    return text


class Vocabulary:
    """Numbers words: ids 0..3 are `SPECIAL_TOKENS`, then words from the most frequent down.

    Args:
        words: the words without the special tokens, in the order of their ids.
        segmenter: how captions are split into words: see `tokenize`.

    Raises:
        ValueError: a word stands twice or is a special token.
    """

    def __init__(self, words: Sequence[str], segmenter: str = "none") -> None:
        self.words = (*SPECIAL_TOKENS, *words)
        self.segmenter = segmenter
        self._ids = {word: number for number, word in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            twice = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"words that stand twice in the vocabulary: {twice[:5]}")

    @classmethod
    def build(
        cls,
        captions: Iterable[str],
        *,
        min_count: int = 1,
        max_words: int | None = None,
        segmenter: str = "none",
    ) -> "Vocabulary":
        """Counts the words of captions (give it the training split only).

        Args:
            captions: raw captions.
            min_count: a word seen less often becomes `<unk>`.
            max_words: keep at most this many words, the most frequent.
            segmenter: how captions are split into words: see `tokenize`.
        """
        counts = Counter(word for caption in captions for word in tokenize(caption, segmenter))
        kept = [word for word, count in counts.items() if count >= min_count]
        kept.sort(key=lambda word: (-counts[word], word))
        return cls([word for word in kept if word not in SPECIAL_TOKENS][:max_words], segmenter)

    def extended(self, other: "Vocabulary", max_words: int | None = None) -> "Vocabulary":
        """This one, its ids unchanged, and after its words those that only `other` has.

        Args:
            other: where more words are taken from, in their order.
            max_words: no word is added beyond this many, special tokens not counted.
        """
        mine = self.words[len(SPECIAL_TOKENS) :]
        more = [word for word in other.words if word not in self._ids]
        room = None if max_words is None else max(max_words - len(mine), 0)
        return Vocabulary([*mine, *more[:room]], self.segmenter)

    def __len__(self) -> int:
        return len(self.words)

    def split(self, caption: str) -> list[str]:
        """A caption's words, known or not."""
        return tokenize(caption, self.segmenter)

    def encode(self, caption: str) -> list[int]:
        """Ids of a caption's words, without start and end."""
        return [self._ids.get(word, UNKNOWN) for word in self.split(caption)]

    def decode(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Words of ids, special tokens included."""
        return tuple(self.words[number] for number in ids)
