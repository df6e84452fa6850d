"""Captions as words: normalising, tokenising, and the vocabulary that numbers the words."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

__all__ = [
    "CLITICS",
    "END",
    "NEVER_WRITTEN",
    "PAD",
    "SPECIAL_TOKENS",
    "START",
    "UNKNOWN",
    "Vocabulary",
    "join",
    "tokenize",
]

PAD, START, END, UNKNOWN = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<start>", "<end>", "<unk>")
NEVER_WRITTEN = (PAD, START, UNKNOWN)  # what a caption that is written freely does not contain

# Tokens that the captioning literature drops before counting or scoring words: the list of
# coco-caption's PTBTokenizer, in the form nltk's tokeniser writes them.
_PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "(", ")", "{", "}", "[", "]", ".", "?", "!", ",", ":", ";"]
    + ["-", "--", "...", '"', "“", "”", "‘", "’", "…", "–", "—", "。", "、", "，"]
)
# What the tokeniser splits off a word belongs to it again in a sentence: "man 's" -> "man's".
CLITICS = frozenset(["'s", "'re", "'ve", "'ll", "'d", "'m", "n't", "'"])


@cache
def _word_tokenizer():  # type: ignore[no-untyped-def]  # nltk has no types
    # Imported late: nltk costs a quarter of a second that captioning a photo does not need.
    # NLTKWordTokenizer is regular expressions only; unlike `word_tokenize` it needs no download.
    from nltk.tokenize import NLTKWordTokenizer

    return NLTKWordTokenizer()


def tokenize(caption: str) -> list[str]:
    """Lower-case words of a caption, without punctuation.

    Unicode is composed (NFC) and typographic apostrophes become ASCII ones, so that one word has
    one spelling. The splitting is the Penn Treebank's, as in the reference scorers.

    >>> tokenize("A man's dog doesn’t jump .")
    ['a', 'man', "'s", 'dog', 'does', "n't", 'jump']
    """
    text = unicodedata.normalize("NFC", caption).lower().replace("’", "'")
    return [word for word in _word_tokenizer().tokenize(text) if word not in _PUNCTUATION]


def join(words: Iterable[str]) -> str:
    """The words as one line of text, clitics attached: the inverse of `tokenize` but for case.

    >>> join(["a", "man", "'s", "dog"])
    "a man's dog"
    """
    text = ""
    for word in words:
        text += word if not text or word in CLITICS else " " + word
    return text


class Vocabulary:
    """Numbers words: ids 0..3 are `SPECIAL_TOKENS`, then words from the most frequent down.

    Args:
        words: the words without the special tokens, in the order of their ids.

    Raises:
        ValueError: a word stands twice or is a special token.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = (*SPECIAL_TOKENS, *words)
        self._ids = {word: number for number, word in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            twice = [word for word, count in Counter(self.words).items() if count > 1]
            raise ValueError(f"words that stand twice in the vocabulary: {twice[:5]}")

    @classmethod
    def build(
        cls, captions: Iterable[str], *, min_count: int = 1, max_words: int | None = None
    ) -> "Vocabulary":
        """Counts the words of captions (give it the training split only).

        Args:
            captions: raw captions.
            min_count: a word seen less often becomes `<unk>`.
            max_words: keep at most this many words, the most frequent.
        """
        counts = Counter(word for caption in captions for word in tokenize(caption))
        kept = [word for word, count in counts.items() if count >= min_count]
        kept.sort(key=lambda word: (-counts[word], word))
        return cls([word for word in kept if word not in SPECIAL_TOKENS][:max_words])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, caption: str) -> list[int]:
        """Ids of a caption's words, without start and end."""
        return [self._ids.get(word, UNKNOWN) for word in tokenize(caption)]

    def decode(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Words of ids, special tokens included."""
        return tuple(self.words[number] for number in ids)
