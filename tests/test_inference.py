"""From a model and photos to captions."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import captioner
from captioner import inference
from captioner.config import SearchConfig
from captioner.errors import InputError
from captioner.inference import Writer, describe_files
from captioner.model import Captioner, load_model, save_model
from captioner.search import Hypothesis
from captioner.text import END, START


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    random = np.random.default_rng(4)
    paths = []
    for number in range(5):
        pixels = random.integers(0, 255, (40 + number, 60, 3), dtype="uint8")
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def written_by_hand(model: Captioner, path: Path, max_words: int) -> tuple[list[int], np.ndarray]:
    """Greedy words and maps by calling the whole model with an ever longer beginning."""
    square = Image.open(path).resize((24, 24), Image.Resampling.BICUBIC)
    photo = np.asarray(square)[None].astype("float32")
    tokens = [START]
    while len(tokens) <= max_words:
        outputs = model({"photos": photo, "tokens": np.array([[tokens]], "int32")})
        logits = np.array(outputs["logits"][0, 0, -1])
        logits[[0, 1, 3]] = -np.inf  # pad, start, unknown
        if len(tokens) == 1:
            logits[END] = -np.inf  # a caption has a word
        token = int(logits.argmax())
        if token == END:
            break
        tokens.append(token)
    attention = np.asarray(outputs["attention"][0, 0, : len(tokens) - 1])
    return tokens[1:], attention


def test_greedy_is_what_the_model_says(tiny_model: Captioner, photos: list[Path]) -> None:
    # Sharper weights than the first ones, so that photos and words differ.
    for weight in tiny_model.decoder.trainable_weights:
        weight.assign(4 * weight)
    for path in photos[:3]:
        caption = captioner.describe(tiny_model, path, beam=1, max_words=7)
        tokens, attention = written_by_hand(tiny_model, path, 7)
        assert caption.words == tiny_model.vocabulary.decode(tokens)
        np.testing.assert_allclose(
            caption.attention.reshape(len(tokens), 6), attention, rtol=1e-3, atol=1e-5
        )
        assert caption.attention.shape == (len(tokens), 2, 3)
        np.testing.assert_allclose(caption.attention.sum(axis=(1, 2)), 1, rtol=1e-5)
        assert caption.gate.shape == caption.word_probabilities.shape == (len(tokens),)
        assert ((caption.word_probabilities > 0) & (caption.word_probabilities <= 1)).all()
        assert caption.text == " ".join(caption.words)


def test_one_photo_alone_or_among_others(tiny_model: Captioner, photos: list[Path]) -> None:
    together = captioner.describe(tiny_model, photos, beam=3)
    assert [one.photo for one in together] == photos
    alone = captioner.describe(tiny_model, str(photos[2]), beam=3)
    assert alone.words == together[2].words
    np.testing.assert_allclose(alone.attention, together[2].attention, rtol=1e-4, atol=1e-6)
    assert alone.score == pytest.approx(together[2].score, rel=1e-4)


def test_files_and_images_give_the_same(tiny_model: Captioner, photos: list[Path]) -> None:
    by_file = captioner.describe(tiny_model, photos[0])
    image = Image.open(photos[0]).convert("RGBA")
    by_image = captioner.describe(tiny_model, image)
    assert by_image.words == by_file.words
    assert by_image.photo is None
    assert by_image.pixels().size == by_file.pixels().size == (60, 40)
    assert by_file.geometry.photo_width == 60


def test_batches_keep_order_and_name_what_cannot_be_read(
    tiny_model: Captioner, photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captioner.inference.BATCH_PHOTOS", 2)
    photos[1].write_bytes(b"no photo")
    results = list(describe_files(Writer(tiny_model), photos, SearchConfig(beam=2)))
    assert [path for path, _ in results] == photos
    assert isinstance(results[1][1], InputError)
    expected = captioner.describe(tiny_model, [photos[0], *photos[2:]], beam=2)
    found = [captions[0] for _, captions in results if not isinstance(captions, InputError)]
    assert [one.words for one in found] == [one.words for one in expected]


def test_a_batch_of_unreadable_photos_only(tiny_model: Captioner, tmp_path: Path) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(b"")
    ((_, result),) = describe_files(Writer(tiny_model), [path], SearchConfig())
    assert isinstance(result, InputError)


def test_n_best_and_sampling(tiny_model: Captioner, photos: list[Path]) -> None:
    writer = Writer(tiny_model)
    regions = np.random.default_rng(8).normal(size=(2, 6, 7)).astype("float32")
    best = writer.write(regions, SearchConfig(beam=4, n_best=3))
    assert [len(hypotheses) for hypotheses in best] == [3, 3]
    for hypotheses in best:
        scores = [one.score for one in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len({one.tokens for one in hypotheses}) == 3

    def sampled(seed: int) -> list[Hypothesis]:
        return writer.write(regions, SearchConfig(sample=True, n_best=2, seed=seed))[0]

    assert [one.tokens for one in sampled(1)] == [one.tokens for one in sampled(1)]
    drawn = {one.tokens for seed in range(8) for one in sampled(seed)}
    assert len(drawn) > 4


def test_special_tokens_are_never_written(tiny_model: Captioner) -> None:
    bias = tiny_model.decoder.head_words.bias
    bias.assign(np.where(np.arange(17) < 4, 30.0, 0.0))  # it wants nothing but special tokens
    regions = np.zeros((1, 6, 7), "float32")
    for options in (SearchConfig(beam=1), SearchConfig(beam=3), SearchConfig(sample=True)):
        ((best, *_),) = Writer(tiny_model).write(regions, options)
        assert len(best.tokens) == 1  # one word, then the end, which is what it wants most
        assert best.tokens[0] >= 4


def test_without_attention_there_is_no_map(tiny_encoder, photos: list[Path]) -> None:
    model = Captioner(tiny_encoder, ["a", "b"], units=11, embedding_units=3, attention="none")
    caption = captioner.describe(model, photos[0], beam=2)
    assert caption.attention is None
    assert caption.gate is None
    assert caption.words


def test_options_out_of_range(tiny_model: Captioner, photos: list[Path]) -> None:
    with pytest.raises(InputError, match="beam"):
        captioner.describe(tiny_model, photos[0], beam=0)
    with pytest.raises(InputError, match="is not an image"):
        captioner.describe(tiny_model, __file__)


def test_evidence_and_self_attention_on_request(tiny_encoder, photos: list[Path]) -> None:
    model = Captioner(
        tiny_encoder, ["a", "b", "c"], units=11, attention_units=5, embedding_units=3,
        self_attention=2,
    )  # fmt: skip
    plain = captioner.describe(model, photos[0], beam=2)
    assert plain.evidence is None
    assert plain.self_attention is None
    captions = captioner.describe(model, photos[:3], beam=2, evidence=True)
    for caption in captions:
        assert caption.evidence.shape == caption.attention.shape
        np.testing.assert_allclose(caption.evidence.sum(axis=(1, 2)), 1, rtol=1e-5)
        assert caption.self_attention.shape == (2, 8, 6, 6)
        np.testing.assert_allclose(caption.self_attention.sum(axis=-1), 1, rtol=1e-5)
    (_, (best, *_)), (_, (other, *_)) = describe_files(
        Writer(model), photos[:2], SearchConfig(beam=2), extras=photos[:1]
    )
    np.testing.assert_allclose(best.evidence, captions[0].evidence, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(best.self_attention, captions[0].self_attention, rtol=1e-4)
    assert other.words == captions[1].words
    assert other.evidence is other.self_attention is other.runners_up is None


@pytest.mark.parametrize(
    "options", [{"beam": 3}, {"sample": True, "seed": 6}, {"beam": 1, "look": "argmax"}]
)
def test_runners_up_are_the_next_best_words_of_the_same_step(
    tiny_model: Captioner, photos: list[Path], options: dict[str, object]
) -> None:
    for weight in tiny_model.decoder.trainable_weights:
        weight.assign(4 * weight)
    captions = captioner.describe(tiny_model, photos, evidence=True, max_words=5, **options)
    if "sample" in options:
        assert len({len(caption.words) for caption in captions}) > 1  # some are padded
    vocabulary = tiny_model.vocabulary.words
    for path, caption in zip(photos, captions, strict=True):
        assert len(caption.runners_up) == len(caption.words)
        square = np.asarray(Image.open(path).resize((24, 24), Image.Resampling.BICUBIC))
        memory, state = tiny_model.begin(tiny_model.encode(square[None].astype("float32")))
        token = START
        for index, word in enumerate(caption.words):
            look = options.get("look", "expected")
            output = tiny_model.decoder.step(np.array([[token]]), state, memory, look)
            state, token = output.state, vocabulary.index(word)
            logits = np.array(output.logits[0, 0], "float64")
            probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            # The step that is read again is the one that chose the word.
            assert caption.word_probabilities[index] == pytest.approx(
                probabilities[token], rel=1e-3
            )
            others = sorted(
                (number for number in range(17) if number not in (0, 1, 3, token)),
                key=lambda number: -probabilities[number],
            )
            names, given = zip(*caption.runners_up[index], strict=True)
            assert names == tuple(vocabulary[number] for number in others[:4])
            np.testing.assert_allclose(given, probabilities[others[:4]], rtol=1e-3)


def test_where_regions_are_drawn_there_are_no_runners_up(
    tiny_model: Captioner, photos: list[Path]
) -> None:
    caption = captioner.describe(tiny_model, photos[0], beam=1, look="sampled", evidence=True)
    assert caption.evidence is not None
    assert caption.runners_up is None


@pytest.mark.parametrize("look", ["sampled", "argmax"])
def test_looking_at_one_region(tiny_model: Captioner, look: str) -> None:
    for weight in tiny_model.decoder.trainable_weights:
        weight.assign(4 * weight)
    writer = Writer(tiny_model)
    regions = np.random.default_rng(8).normal(size=(1, 6, 7)).astype("float32")

    def write(**options: object) -> Hypothesis:
        return writer.write(regions, SearchConfig(beam=1, **options))[0][0]

    expected, looked = write(), write(look=look)
    # The first word's alpha is the same whatever is then looked at; its probability is not.
    np.testing.assert_allclose(looked.attention[0], expected.attention[0], rtol=1e-5)
    assert looked.log_probabilities[0] != pytest.approx(expected.log_probabilities[0], abs=1e-4)
    assert write(look=look).tokens == looked.tokens
    if look == "sampled":
        assert len({write(look=look, seed=seed).tokens for seed in range(12)}) > 1


def test_what_describe_compiles_is_kept(tiny_model: Captioner, photos: list[Path]) -> None:
    first = captioner.describe(tiny_model, photos[0], beam=2)
    writer = tiny_model.writer
    # Weights that change afterwards count; saving is not disturbed.
    tiny_model.decoder.head_words.bias.assign(np.where(np.arange(17) == 9, 50.0, 0.0))
    second = captioner.describe(tiny_model, photos[0], beam=2)
    assert tiny_model.writer is writer
    assert set(second.words) == {tiny_model.vocabulary.words[9]}
    assert second.words != first.words
    save_model(tiny_model, photos[0].with_name("model.keras"))
    loaded = load_model(photos[0].with_name("model.keras"))
    assert captioner.describe(loaded, photos[0], beam=2).words == second.words


def test_only_the_latest_searches_stay_compiled(
    tiny_model: Captioner, photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "SEARCHES", 2)
    first = captioner.describe(tiny_model, photos[0], max_words=2)
    finds = []
    monkeypatch.setattr(Writer, "find", lambda *args, f=Writer.find: finds.append(1) or f(*args))
    for max_words in (2, 3, 5, 5, 3, 2):  # 5 takes the place of 2, and then 2 that of 3
        again = captioner.describe(tiny_model, photos[0], max_words=max_words)
    assert again.text == first.text
    assert len(finds) == 3


def test_models_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = inference.shipped_models()
    assert next(iter(shipped)) == "photo" and len(shipped) <= 3
    assert inference.model_file() == inference.model_file("photo") == shipped["photo"]
    monkeypatch.chdir(tmp_path)  # where there is a run of that name
    Path("photo").mkdir()
    (tmp_path / "photo" / "captioner.keras").touch()
    assert inference.model_file("photo") == shipped["photo"]
    own = tmp_path / "photo"
    assert inference.model_file(own) == own / "captioner.keras"
