"""Type fits its room, and letters of any script come from a font that has them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image, ImageDraw

from captioner import lettering


def test_words_too_long_for_their_panel_are_shrunk_then_shortened() -> None:
    fits, font = lettering.fit("dog", 100, 18)
    assert (fits, font.size) == ("dog", 18)
    shrunk, font = lettering.fit("photographic", 100, 18)
    assert shrunk == "photographic"
    assert 0.6 * 18 < font.size < 18
    assert font.getlength(shrunk) <= 100
    shortened, font = lettering.fit("donaudampfschifffahrtsgesellschaft" * 3, 110, 18)
    assert shortened.endswith("…")
    assert shortened.startswith("donau")
    assert font.getlength(shortened) <= 110


def test_long_sentences_are_wrapped_without_losing_a_letter() -> None:
    text = "a very long sentence " * 7 + "donaudampfschifffahrtsgesellschaft" * 5
    lines = lettering.wrap(text, 300, 23)
    assert len(lines) > 5
    assert all(lettering.typeface(text, 23).getlength(line) <= 300 for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


@pytest.fixture
def installed_font(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A system whose only other font has the one letter 狗, drawn as a full square."""
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "dog"])
    builder.setupCharacterMap({ord("狗"): "dog"})
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 1000), (1000, 1000), (1000, 0)):
        pen.lineTo(corner)
    pen.closePath()
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "dog": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "dog": (1000, 0)})
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Dog", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    path = tmp_path / "dog.ttf"
    builder.save(path)
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    fonts = [str(tmp_path / "broken.ttf"), str(path)]
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: fonts)
    lettering._system_fonts.cache_clear()
    lettering._font_file.cache_clear()
    yield str(path)
    lettering._system_fonts.cache_clear()
    lettering._font_file.cache_clear()


def test_letters_that_dejavu_lacks_come_from_an_installed_font(installed_font: str) -> None:
    assert lettering.typeface("狗", 20).path == installed_font
    canvas = Image.new("L", (20, 20), 255)
    ImageDraw.Draw(canvas).text((0, 0), "狗", 0, lettering.typeface("狗", 20))
    assert np.asarray(canvas).mean() < 5  # the square, not DejaVu's empty box


def test_text_that_no_font_has_whole_is_cut_into_runs(installed_font: str) -> None:
    pieces = [
        (text, Path(font.path).name) for text, font in lettering.runs("a 狗狗 e\u0301té 狗", 20)
    ]
    dejavu, dog = "DejaVuSans.ttf", Path(installed_font).name
    assert pieces == [("a ", dejavu), ("狗狗", dog), (" e\u0301té ", dejavu), ("狗", dog)]
    assert [text for text, _ in lettering.runs("a dog", 20)] == ["a dog"]
    # Each 狗 is 20 pixels wide; DejaVu's empty box is narrower, and would let a fourth one in.
    assert lettering.wrap("a狗狗狗狗", 20 * 3.9, 20) == ("a狗狗狗", "狗")


def test_dejavu_is_kept_where_no_font_has_more(installed_font: str) -> None:
    for text in ("dog", "собака", "猫", ""):
        assert Path(lettering.typeface(text, 20).path).name == "DejaVuSans.ttf"
    assert Path(lettering.typeface("dog", 20, bold=True).path).name == "DejaVuSans-Bold.ttf"
