"""Words and their numbers."""

import sys

import pytest

from captioner import text as text_module
from captioner.errors import InputError
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
        ("¿Qué hace? «L’eau» — „Hund“…", "qué hace l'eau hund"),
        ("Un col·legi, un château-fort", "un col·legi un château-fort"),
        ("Собака бежит; 한국어 개가", "собака бежит 한국어 개가"),
        ("狗在草地上。穿T恤的人！", "狗 在 草 地 上 穿 t 恤 的 人"),
        ("ラーメンを食べる", "ラ ー メ ン を 食 べ る"),
        ("สวัสดี", "ส วั ส ดี"),
        ("wow🐶🎉 👨‍👩‍👧❤️🇨🇳", "wow 🐶 🎉 👨‍👩‍👧 ❤️ 🇨🇳"),
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


@pytest.mark.parametrize("segmenter", ["none", "jieba"])
@pytest.mark.parametrize(
    "text",
    [
        "一只棕色的狗在草地上奔跑",
        "穿t恤的人",
        "ラーメンを食べる人",
        "สวัสดีครับ",
        "a dog 🐶 at the café",
        "狗🐶在跑",
    ],
)
def test_join_puts_no_spaces_where_a_script_has_none(text: str, segmenter: str) -> None:
    assert join(tokenize(text, segmenter)) == text


def test_jieba_cuts_chinese_into_words_and_leaves_the_rest() -> None:
    words = "一只 棕色 的 狗 在 草地 上 a man 's t 恤 🐶"
    assert tokenize("一只棕色的狗，在草地上。A man’s T恤🐶", "jieba") == words.split()
    captions = ["Two men, one in red; one (older) waves!", "ラーメン", "¿Un cafe\u0301?"]
    assert [tokenize(text, "jieba") for text in captions] == [tokenize(text) for text in captions]


def test_a_segmenter_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    text_module._jieba.cache_clear()
    with pytest.raises(InputError, match="pip install jieba, or train without --segmenter jieba"):
        tokenize("狗", "jieba")
    assert tokenize("a dog", "jieba") == ["a", "dog"]


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


def test_vocabulary_keeps_how_captions_are_split() -> None:
    for segmenter, words in (
        ("none", ("上", "在", "地", "狗", "草")),
        ("jieba", ("上", "在", "狗", "草地")),
    ):
        vocabulary = Vocabulary.build(["狗在草地上"], segmenter=segmenter)
        assert vocabulary.words[4:] == words
        assert vocabulary.decode(vocabulary.encode("草地")) == tuple(vocabulary.split("草地"))


def test_an_extended_vocabulary_keeps_its_ids() -> None:
    known, other = Vocabulary(["dog", "a"]), Vocabulary(["a", "cat", "boat"])
    assert known.extended(other).words == (*known.words, "cat", "boat")
    assert known.extended(other, 3).words == (*known.words, "cat")
    assert known.extended(other, 1).words == known.words


def test_vocabulary_refuses_doubles() -> None:
    with pytest.raises(ValueError, match=r"twice in the vocabulary: \['dog'\]"):
        Vocabulary(["dog", "cat", "dog"])
