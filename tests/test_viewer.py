"""The page, as people use it: in a browser, by mouse, finger and keyboard."""

import base64
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from captioner import overlay, viewer
from captioner.caption import Caption
from captioner.images import RESIZES, Geometry

GRID = (5, 7)
PEAKS = [(2, 3), (1, 2), (3, 4), (2, 5)]  # of the words of "a red dog runs"


def described(
    text: str = "a red dog runs",
    *,
    size: tuple[int, int] = (130, 110),
    resize: str = "stretch",
    name: str = "dog.jpg",
    image: Image.Image | None = None,
) -> Caption:
    """Word `t` looks at one cell most, `PEAKS[t]`; its evidence lies on the opposite side."""
    words = tuple(text.split())
    maps = np.full((len(words), *GRID), 0.2 / 34, np.float32)
    for index in range(len(words)):
        maps[(index, *PEAKS[index % 4])] = 0.8 / (index % 4 + 1)
    if image is None:
        image = Image.new("RGB", size, (160, 160, 160))
    return Caption(
        text=text,
        words=words,
        word_probabilities=np.linspace(0.9, 0.5, len(words)),
        score=-1.5,
        attention=maps,
        gate=np.linspace(0.3, 0.7, len(words)),
        geometry=Geometry.of(image, 224, resize),
        image=image,
        photo=Path("photos") / name,
        evidence=maps[:, ::-1, ::-1].copy(),
        runners_up=tuple((("cat", 0.0312), ("<end>", 0.0123)) for _ in words),
    )


def shaded(size: tuple[int, int]) -> Image.Image:
    """A photo whose colours change slowly, so that WebP hardly changes them."""
    y, x = np.mgrid[: size[1], : size[0]]
    red, green = 200 * x / size[0], 200 * y / size[1]
    return Image.fromarray(np.stack([red + 30, green + 30, 230 - red], -1).astype(np.uint8))


def data_of(path: Path) -> list[dict[str, Any]]:
    """The photos of a page as its script reads them."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" class="photo">(.*?)</script>', text)
    return [json.loads(one) for one in found]


def photo_in(data: dict[str, Any]) -> Image.Image:
    kind, content = data["photo"].split(",")
    assert kind == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page of captions in a browser that must find nothing to complain of.

    Whatever a test does, the console stays empty and no request leaves the file.
    """
    complaints: list[str] = []
    contexts = []

    def show(
        captions: dict[str, list[Caption]] | list[Caption],
        *,
        width: int = 1200,
        notes: list[list[str]] | None = None,
        title: str = "dogs",
        **options: Any,
    ) -> Any:
        models = captions if isinstance(captions, dict) else {"soft": captions}
        path = tmp_path / "page.html"
        viewer.save_page(models, path, title=title, notes=notes)
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("data:", path.as_uri()))
                else complaints.append(request.url)
            ),
        )
        page.clock.install()
        page.goto(path.as_uri())
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


def words_of(page: Any, number: int = 0) -> Any:
    return page.locator(".sentence").nth(number).get_by_role("button")


def drawn(page: Any, number: int = 0) -> np.ndarray:
    """What a photo's canvas shows, RGB."""
    canvas = page.locator(".stage canvas").nth(number)
    assert canvas.is_visible()
    url = canvas.evaluate("canvas => canvas.toDataURL()")
    picture = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    return np.asarray(picture.convert("RGB"), int)


def current(page: Any) -> list[str]:
    return page.locator("[aria-current]").all_inner_texts()


def slide(page: Any, name: str, value: int) -> None:
    page.get_by_role("slider", name=name).fill(str(value))


# ---- maps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", RESIZES)
def test_the_peak_drawn_lies_where_the_map_s_peak_is(
    resize: str, open_page: Callable[..., Any]
) -> None:
    sizes = [(130, 110), (90, 170), (400, 130)]
    captions = [described(size=size, resize=resize) for size in sizes]
    page = open_page(captions)
    seen = 0
    for number, caption in enumerate(captions):
        for index, (row, column) in enumerate(PEAKS[:2]):
            left, top, right, bottom = caption.geometry.cell_box(row, column, GRID)
            x, y = (left + right) / 2 / sizes[number][0], (top + bottom) / 2 / sizes[number][1]
            if not (0 < x < 1 and 0 < y < 1):
                continue  # the cell lies on a bar that `pad` added
            seen += 1
            words_of(page, number).nth(index).hover()
            shown = drawn(page, number)
            brightest = np.argwhere(shown.sum(-1) >= shown.sum(-1).max() - 1).mean(0) + 0.5
            height, width = shown.shape[:2]
            assert width / height == pytest.approx(sizes[number][0] / sizes[number][1], rel=0.01)
            assert abs(brightest[1] / width - x) < 0.1 * (right - left) / sizes[number][0]
            assert abs(brightest[0] / height - y) < 0.1 * (bottom - top) / sizes[number][1]
    assert seen >= 4


@pytest.mark.parametrize("resize", RESIZES)
def test_the_page_draws_what_the_figure_draws(resize: str, open_page: Callable[..., Any]) -> None:
    photo = shaded((230, 170))
    caption = described(image=photo, resize=resize)
    page = open_page([caption])
    for kind, maps in (("alpha", caption.attention), ("evidence", caption.evidence)):
        page.get_by_role("radio", name=kind).check()
        words_of(page).nth(3).hover()
        shown = drawn(page)
        height, width = shown.shape[:2]
        alpha = overlay.spread(maps[3], caption.geometry, width, height)
        large = photo.resize((width, height), Image.Resampling.BICUBIC)
        expected = np.asarray(overlay.blend(large, alpha, float(maps.max())), int)
        difference = np.abs(shown - expected)
        assert difference.mean() < 2
        assert np.quantile(difference, 0.99) < 10


def test_hovering_changes_the_canvas_and_escape_takes_it_away(
    open_page: Callable[..., Any],
) -> None:
    page = open_page([described()])
    assert not page.locator(".stage canvas").is_visible()
    words_of(page).nth(0).hover()
    first = drawn(page)
    words_of(page).nth(2).hover()
    assert current(page) == ["dog"]
    assert np.abs(drawn(page) - first).max() > 50
    page.mouse.move(0, 0)  # what was chosen stays, so that one can go to the sliders
    assert current(page) == ["dog"]
    words_of(page).nth(2).focus()
    page.keyboard.press("Escape")
    assert current(page) == []
    assert not page.locator(".stage canvas").is_visible()
    words_of(page).nth(1).hover()
    page.locator(".stage").click()
    assert current(page) == []


def test_a_finger_works_as_well(open_page: Callable[..., Any]) -> None:
    page = open_page([described()], width=375, has_touch=True, is_mobile=True)
    words_of(page).nth(2).tap()
    assert current(page) == ["dog"]
    assert drawn(page).size


def test_opacity_and_threshold(open_page: Callable[..., Any]) -> None:
    page = open_page([described()])
    words_of(page).nth(1).hover()
    full = drawn(page)
    slide(page, "Opacity", 0)
    assert np.abs(drawn(page) - 160).max() <= 2  # the photo alone
    slide(page, "Opacity", 50)
    half = drawn(page)
    assert np.abs(full - 160).mean() > np.abs(half - 160).mean() > 5
    slide(page, "Opacity", 100)
    assert np.array_equal(drawn(page), full)
    slide(page, "Threshold", 30)
    lit = np.ptp(drawn(page), axis=-1) > 20  # unlit parts are grey
    alpha = overlay.spread(described().attention[1], described().geometry, *lit.shape[::-1])
    assert np.mean(lit == (alpha / 0.8 >= 0.3)) > 0.99
    assert 0 < lit.mean() < (np.ptp(full, axis=-1) > 20).mean()


# ---- words ---------------------------------------------------------------------------------------


def test_a_word_is_told_with_its_numbers_and_the_runners_up(open_page: Callable[..., Any]) -> None:
    page = open_page([described()])
    words_of(page).nth(2).hover()
    facts = page.locator(".facts")
    assert facts.inner_text() == (
        "dog p 0.63 · gate 0.57 · peak 26.7%\ninstead: cat 0.03 · <end> 0.01"
    )
    assert page.locator(".scale").inner_text().split() == (
        ["0%", "80.0%", "·", "even", "spread", "2.9%"]
    )
    label = page.locator(".stage canvas").get_attribute("aria-label")
    assert label == "alpha map of “dog”: brightest at the bottom middle"
    page.get_by_role("radio", name="evidence").check()
    label = page.locator(".stage canvas").get_attribute("aria-label")
    assert label == "evidence map of “dog”: brightest at the top middle"


def test_arrow_keys_home_and_end(open_page: Callable[..., Any]) -> None:
    page = open_page([described(), described("two dogs")])
    page.get_by_role("slider", name="Threshold").focus()
    page.keyboard.press("Tab")  # the sentence is one stop, whatever its length
    assert current(page) == ["a"]
    for key, word in (
        *(("ArrowRight", "red"), ("End", "runs"), ("ArrowRight", "runs")),
        *(("ArrowLeft", "dog"), ("Home", "a"), ("ArrowLeft", "a")),
    ):
        page.keyboard.press(key)
        assert current(page) == [word]
        assert page.evaluate("document.activeElement.textContent") == word
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "▶ Play"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "two"


def test_in_a_script_from_right_to_left_the_arrows_follow_the_eye(
    open_page: Callable[..., Any],
) -> None:
    page = open_page([described("كلب أحمر يجري")])
    words_of(page).nth(0).focus()
    page.keyboard.press("ArrowLeft")
    assert current(page) == ["أحمر"]


def test_play_runs_through_the_words_and_stops(open_page: Callable[..., Any]) -> None:
    page = open_page([described()])
    # Or it would go on by itself, too, while a busy machine runs the lines below.
    page.clock.pause_at(page.evaluate("Date.now()") + 60_000)
    page.get_by_role("button", name="Play").click()
    page.mouse.move(0, 0)
    heard = []
    for _ in range(4):
        heard += current(page)
        assert page.locator(".play").inner_text() == "■ Stop"
        assert page.locator(".facts").get_attribute("aria-live") == "off"
        page.clock.run_for(900)
    assert heard == ["a", "red", "dog", "runs"]
    assert page.locator(".play").inner_text() == "▶ Play"
    assert page.locator(".facts").get_attribute("aria-live") == "polite"
    page.get_by_role("button", name="Play").click()
    page.get_by_role("button", name="Stop").click()
    page.clock.run_for(2000)
    assert current(page) == ["a"]


def test_what_was_split_off_a_word_is_joined_to_it(open_page: Callable[..., Any]) -> None:
    caption = dataclasses.replace(
        described("a man 's dog"), text="a man's dog", words=("a", "man", "'s", "dog")
    )
    page = open_page([caption])
    assert page.locator(".sentence").inner_text() == "a man's dog"
    assert words_of(page).count() == 4


# ---- many photos, several models -----------------------------------------------------------------


def test_search_goes_through_captions_names_and_notes(open_page: Callable[..., Any]) -> None:
    page = open_page(
        [described(), described("a Black cat", name="IMG_7.jpg"), described("two dogs")],
        notes=[["woof"], [], ["Hunde"]],
    )
    box = page.get_by_role("searchbox", name="Search")
    shown = page.locator("article:visible h2")
    for sought, names in (
        ("dog", 2), ("black", 1), ("img_7", 1), ("hund TWO", 1), ("horse", 0), ("", 3),
    ):  # fmt: skip
        box.fill(sought)
        assert shown.count() == names
        assert page.get_by_role("status").inner_text() == f"{names} of 3 photos"


def test_two_models_stand_side_by_side_and_do_not_mix(open_page: Callable[..., Any]) -> None:
    soft = described()
    hard = dataclasses.replace(described("one dog"), attention=None, gate=None, runners_up=None)
    page = open_page({"runs/soft": [soft], "runs/hard": [hard]})
    assert page.get_by_role("article").count() == 1
    assert page.get_by_role("heading", level=3).all_inner_texts() == ["runs/soft", "runs/hard"]
    left, right = (one.bounding_box() for one in page.locator(".stage").all())
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]
    words_of(page, 0).nth(2).hover()
    words_of(page, 1).nth(1).hover()
    assert current(page) == ["dog", "dog"]
    assert page.locator(".facts").all_inner_texts()[1] == "dog p 0.50"
    assert page.locator(".scale").nth(1).inner_text() == (
        "no alpha map: this model has no attention"
    )
    assert [one.is_visible() for one in page.locator(".stage canvas").all()] == [True, False]
    page.get_by_role("radio", name="evidence").check()
    assert [one.is_visible() for one in page.locator(".stage canvas").all()] == [True, True]


def test_what_no_caption_carries_is_not_offered(open_page: Callable[..., Any]) -> None:
    page = open_page([dataclasses.replace(described(), evidence=None)])
    assert page.get_by_role("radio", name="alpha").is_checked()
    assert page.get_by_role("radio", name="evidence").is_disabled()
    page = open_page([dataclasses.replace(described(), attention=None)])
    assert page.get_by_role("radio", name="evidence").is_checked()
    page = open_page([described("")])
    assert not page.locator(".play").is_visible()


# ---- for everybody -------------------------------------------------------------------------------


def test_a_phone_shows_all_without_scrolling_sideways(open_page: Callable[..., Any]) -> None:
    captions = [
        described("a " + "donaudampfschifffahrtsgesellschaft" * 3, size=(3000, 100)),
        described(" ".join(["word"] * 25), size=(100, 3000), name="n" * 120 + ".jpg"),
    ]
    page = open_page({"runs/soft": captions, "runs/" + "h" * 90: captions}, width=375)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    for stage in page.locator(".stage").all():
        box = stage.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375
        assert box["height"] <= 900


def test_light_and_dark(open_page: Callable[..., Any]) -> None:
    def paper_and_ink(scheme: str) -> list[float]:
        page = open_page([described()], color_scheme=scheme)
        style = "getComputedStyle(document.body)"
        pair = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
        return [sum(map(int, re.findall(r"\d+", colour))) for colour in pair]

    paper, ink = paper_and_ink("light")
    assert paper > 700 > 200 > ink
    paper, ink = paper_and_ink("dark")
    assert ink > 600 > 200 > paper


def test_a_screen_reader_finds_everything_by_name(open_page: Callable[..., Any]) -> None:
    page = open_page([described(), described()], notes=[["woof"], []])
    tree = page.locator("body").aria_snapshot()
    for line in (
        'heading "dogs" [level=1]',
        'searchbox "Search"',
        'radio "alpha" [checked]',
        'slider "Opacity": "100"',
        'slider "Threshold": "0"',
        'article "dog.jpg"',
        'img "a red dog runs"',
        'group "Words of the caption"',
        'button "dog"',
        "listitem: woof",
    ):
        assert line in tree, tree
    words_of(page).nth(1).hover()
    assert "a red dog runs" in page.locator(".stage img").first.get_attribute("alt")
    outline = "getComputedStyle(document.activeElement).outlineWidth"
    words_of(page).nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(outline) == "3px"


# ---- the file ------------------------------------------------------------------------------------

HOSTILE = (
    '</script><script>document.title="taken"</script><!--<script><img/src=http://a.b/c>&amp;"\''
)


def test_hostile_text_is_shown_and_does_nothing(open_page: Callable[..., Any]) -> None:
    caption = dataclasses.replace(
        described(name=HOSTILE.replace("/", "∕")),
        text=HOSTILE,
        words=(HOSTILE, "\ud800", "{{data}}", "dog"),
    )
    page = open_page({HOSTILE: [caption], "b": [caption]}, notes=[[HOSTILE]], title=HOSTILE)
    assert page.title() == HOSTILE
    assert page.get_by_role("heading", level=1).inner_text() == HOSTILE
    assert words_of(page).nth(0).inner_text() == HOSTILE
    assert page.get_by_role("listitem").first.inner_text() == HOSTILE
    assert page.locator("script").count() == 2  # the page's own: its script and its constants
    assert page.locator("img:not(.stage img, .scale img)").count() == 0


def test_no_script_but_the_page_s_own_is_run(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    viewer.save_page({"a": [described()]}, path, title="dogs")
    smuggled = '<script>document.title = "taken"</script><img src="http://127.0.0.1:9/x.png">'
    path.write_text(path.read_text("utf-8").replace("<main>", smuggled + "<main>"), "utf-8")
    context = browser.new_context()
    page = context.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(path.as_uri())
    assert page.title() == "dogs"
    assert len([line for line in refused if "Content Security Policy" in line]) == 2
    assert words_of(page).count() == 4
    context.close()


def test_a_photo_takes_less_than_150_kb_whatever_it_is(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (1500, 2000, 3), dtype=np.uint8)
    noise = Image.fromarray(pixels)  # nothing compresses worse
    caption = described(" ".join(["word"] * 25), image=noise)
    fine = np.random.default_rng(0).dirichlet(np.ones(28 * 28), 25).reshape(25, 28, 28)
    fine = dataclasses.replace(caption, attention=fine, evidence=fine)
    path = tmp_path / "page.html"
    for captions in ({"a": [caption]}, {"soft": [fine]}, {"soft": [fine], "hard": [fine]}):
        viewer.save_page(captions, path, title="noise")
        assert path.stat().st_size < 150_000
        assert min(photo_in(data_of(path)[0]).size) > 100


def test_photos_keep_their_shape_and_are_never_enlarged(tmp_path: Path) -> None:
    sizes = [(2000, 1500), (60, 40), (6000, 100)]
    path = tmp_path / "page.html"
    viewer.save_page({"a": [described(size=size) for size in sizes]}, path, title="shapes")
    shown = [photo_in(data) for data in data_of(path)]
    assert [one.size for one in shown] == [(800, 600), (60, 40), (1600, 27)]
    assert [data["size"] for data in data_of(path)] == [list(size) for size in sizes]


def test_maps_are_kept_to_half_a_percent_of_their_peak(tmp_path: Path) -> None:
    caption = described()
    path = tmp_path / "page.html"
    viewer.save_page({"a": [caption]}, path, title="maps")
    maps = data_of(path)[0]["captions"][0]["maps"]["alpha"]
    cells = np.frombuffer(base64.b64decode(maps["cells"]), np.uint8).reshape(4, *GRID)
    peaks = np.array(maps["peaks"])[:, None, None]
    assert np.abs(cells / 255 * peaks - caption.attention).max() <= 0.002 * 0.8 + 1e-6
    assert maps["highest"] == pytest.approx(0.8)


def test_a_page_is_written_whole_into_a_new_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    viewer.save_page({"a": [described()]}, path, title="dogs & cats")
    assert [entry.name for entry in path.parent.iterdir()] == ["page.html"]
    assert "<h1>dogs &amp; cats</h1>" in path.read_text("utf-8")
    with pytest.raises(ValueError, match="shorter"):
        viewer.save_page({"a": [described()]}, path, title="b", notes=[])
    with pytest.raises(ValueError, match="shorter"):
        viewer.save_page({"a": [described()], "b": []}, path, title="b")
    assert "dogs &amp; cats" in path.read_text("utf-8")
