"""Words and their numbers."""

import pytest

from captioner.text import END, PAD, SPECIAL_TOKENS, START, UNKNOWN, Vocabulary, join, tokenize


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A Dog runs .", "a dog runs"),
        (
            "Two men, one in red; one (older) waves!",
            "two men one in red one older waves",
        ),
        ("A man's hat doesn't fit", "a man 's hat does n't fit"),
        ("A man’s hat", "a man 's hat"),
        ('A sign says "stop"', "a sign says stop"),
        ("a black-and-white dog", "a black-and-white dog"),
        ("Un cafe\u0301 \u00e0 Paris", "un caf\u00e9 \u00e0 paris"),
        ("  \n ", ""),
        ("<start> of a race <end>", "< start > of a race < end >"),
    ],
)
def test_tokenize(caption: str, words: str) -> None:
    assert tokenize(caption) == words.split()


def test_special_tokens_cannot_be_typed() -> None:
    vocabulary = Vocabulary.build(["<start> <end> <unk> <pad> dog"])
    ids = vocabulary.encode("<start> <end> <unk> <pad>")
    assert not {PAD, START, END} & set(ids)


def test_join_attaches_clitics() -> None:
    assert join(["a", "man", "'s", "hat", "does", "n't", "fit"]) == "a man's hat doesn't fit"
    assert join([]) == ""
    assert join(["'s"]) == "'s"


def test_vocabulary_is_ordered_by_count_then_alphabet() -> None:
    captions = ["b a a", "b c a", "d"]
    vocabulary = Vocabulary.build(captions)
    assert vocabulary.words == (*SPECIAL_TOKENS, "a", "b", "c", "d")
    assert vocabulary.encode("d b zebra") == [7, 5, UNKNOWN]
    assert vocabulary.decode([7, 5, END]) == ("d", "b", "<end>")
    assert len(vocabulary) == 8


def test_vocabulary_limits() -> None:
    captions = ["a a a b b c"]
    assert Vocabulary.build(captions, min_count=2).words[4:] == ("a", "b")
    assert Vocabulary.build(captions, max_words=1).words[4:] == ("a",)


def test_vocabulary_refuses_doubles() -> None:
    with pytest.raises(ValueError, match=r"twice in the vocabulary: \['dog'\]"):
        Vocabulary(["dog", "cat", "dog"])
