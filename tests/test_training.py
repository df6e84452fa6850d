"""Training runs: what they leave, how they stop and how they go on."""

import csv
import dataclasses
import itertools
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

import captioner
from captioner import metrics, training
from captioner.__main__ import main
from captioner.config import (
    DataConfig,
    ModelConfig,
    TrainConfig,
    TrainingConfig,
    VocabularyConfig,
)
from captioner.errors import InputError
from captioner.model import save_model
from captioner.training import train

COLOURS = ("red", "green", "blue", "white", "black", "orange", "purple")
EPOCHS = 3


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen one-coloured photos, each with two captions in a .txt beside it."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(14):
        colour = COLOURS[number % 7]
        Image.new("RGB", (80 + number, 70), colour).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a {colour} wall\n{colour} paint\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def small_backbone(module_tiny_encoder: keras.Model) -> Iterator[None]:
    """A run spends its time compiling; with the tiny encoder it is a few seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "build_encoder", lambda *_, **__: module_tiny_encoder)
        yield


def config(photos: Path, **training_options: object) -> TrainConfig:
    options = {
        "epochs": EPOCHS,
        "batch_photos": 3,
        "precision": "float32",
        "learning_rate": 0.02,
        # With all that has a state of its own: a resumed run must get it back.
        "views": 2,
        "average": 0.9,
        **training_options,
    }
    return TrainConfig(
        DataConfig(data=photos),
        VocabularyConfig(min_count=1),
        ModelConfig(
            units=11,
            attention_units=5,
            embedding_units=3,
            dropout=0.2,
            positions=True,
            word_query=True,
            grounding_weight=0.5,
        ),
        TrainingConfig(**options),
    )


def weights(run: Path) -> list[np.ndarray]:
    with np.load(run / "checkpoint" / "state.npz") as arrays:
        return [arrays[name] for name in arrays.files if name.startswith("variable")]


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    train(config(photos), run)
    return run


def test_what_a_run_leaves(finished: Path, photos: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {
        *("config.json", "captioner.keras", "checkpoint", "history.csv", "tensorboard"),
        *("samples.html", "curves.png"),
    }
    with (finished / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert float(rows[-1]["word_loss"]) < float(rows[0]["word_loss"])
    assert all(0 <= float(row["bleu_4"]) <= 1 for row in rows)
    saved = TrainConfig.from_json((finished / "config.json").read_text())
    assert saved == config(photos)
    assert list((finished / "tensorboard").glob("events*"))
    page = (finished / "samples.html").read_text()
    assert page.count('class="photo"') == 1  # one dev photo in ten of 14
    assert '"instead":[["' in page  # with the runners-up, and evidence
    assert '"evidence":{' in page
    model = captioner.load(finished)
    caption = captioner.describe(model, photos / "3.png", beam=2)
    assert set(caption.words) <= {"a", "wall", "paint", *COLOURS}
    assert caption.attention.shape == (len(caption.words), 2, 3)
    assert model.about["data"] == photos.name


def interrupt_at(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Ctrl-C after a number of batches."""
    seen = []
    original = training._Watcher.batch_done

    def batch_done(self: training._Watcher, logs: dict[str, float]) -> None:
        original(self, logs)
        seen.append(logs)
        if len(seen) == batch:
            raise KeyboardInterrupt

    monkeypatch.setattr(training._Watcher, "batch_done", batch_done)


@pytest.mark.parametrize("batch", [2, 8])  # of 4 per epoch: within one, at the end of one
def test_interrupted_and_resumed_is_the_same_as_undisturbed(
    photos: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_at(patch, batch)
        with pytest.raises(KeyboardInterrupt):
            train(config(photos), run)
    captioner.load(run)  # usable already
    train(TrainConfig(), run, resume=True)
    for mine, expected in zip(weights(run), weights(finished), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)
    with (run / "history.csv").open() as mine, (finished / "history.csv").open() as expected:
        scores = [
            [(row["epoch"], row["bleu_4"], row["cider"]) for row in csv.DictReader(stream)]
            for stream in (mine, expected)
        ]
    assert scores[0] == scores[1]


def test_killed_while_writing_a_checkpoint(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    writes = []
    savez = np.savez

    def killed(stream, **arrays):
        writes.append(stream)
        if len(writes) == 2:
            stream.write(b"PK half a checkpoint")
            raise SystemExit("killed")
        savez(stream, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(training.np, "savez", killed)
        with pytest.raises(SystemExit, match="killed"):
            train(config(photos), run)
    train(config(photos), run, resume=True)
    for mine, expected in zip(weights(run), weights(finished), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)


def test_a_damaged_checkpoint_is_not_the_end(
    photos: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6)  # of 4 per epoch: a checkpoint here, and one after the first epoch
        with pytest.raises(KeyboardInterrupt):
            train(config(photos), run)
    newest, before = (run / "checkpoint" / name for name in ("state.npz", "previous.npz"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # one bit
    newest.write_bytes(content)
    kept = before.read_bytes()
    train(TrainConfig(), run, resume=True)
    assert "state.npz: damaged" in caplog.text
    for mine, expected in zip(weights(run), weights(finished), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)

    newest.write_bytes(b"PK")
    before.write_bytes(kept[:-9])
    with pytest.raises(InputError, match="as is every other checkpoint of this run; start a new"):
        train(TrainConfig(), run, resume=True)


def test_a_loss_that_explodes_is_named_and_nothing_of_it_kept(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputError, match=r"the loss is (nan|inf) in epoch 1, batch [2-4]: stopped"):
        train(config(photos, learning_rate=1e30), run)
    assert not (run / "checkpoint").exists()


@pytest.mark.slow
def test_killed_process_goes_on(photos: Path, tmp_path: Path) -> None:
    """SIGKILL between two checkpoints of a real process, then --resume, as a user types it."""
    run = tmp_path / "run"
    command = [
        *(sys.executable, "train.py", "--data", str(photos), "--out", str(run)),
        *("--weights", "none", "--image-size", "64", "--units", "11", "--min-count", "1"),
        *("--epochs", "40", "--patience", "40", "--batch-photos", "1", "--save-minutes", "0"),
    ]
    project = Path(__file__).parents[1]
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE)
    checkpoint = run / "checkpoint" / "state.npz"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    _, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    with np.load(checkpoint) as arrays:
        progress = json.loads(str(arrays["progress"]))
    assert progress["epoch"] < 39

    # The options of the run are kept; only then is it short enough to finish.
    saved = json.loads((run / "config.json").read_text())
    saved["training"]["epochs"] = progress["epoch"] + 2
    (run / "config.json").write_text(json.dumps(saved))
    resumed = subprocess.run(
        [sys.executable, "train.py", "--out", str(run), "--resume"],
        cwd=project,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert f"resuming at epoch {progress['epoch'] + 1}" in resumed.stderr
    with (run / "history.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == progress["epoch"] + 2


def test_hard_attention_may_train_as_soft_first(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hard(**options: object) -> TrainConfig:
        plain = config(photos, **options)
        return dataclasses.replace(plain, model=dataclasses.replace(plain.model, attention="hard"))

    # As dev sees it, it only gets worse: the first of its hard epochs is the best one all the same.
    dev = iter([0.9, 0.5, 0.4])
    monkeypatch.setattr(
        metrics, "fast_scores", lambda *_: dict.fromkeys(("bleu_4", "cider"), next(dev))
    )
    train(hard(soft_epochs=1, patience=1), tmp_path / "hard")
    with (tmp_path / "hard" / "history.csv").open() as stream:
        first, second, third = (float(row["baseline"]) for row in csv.DictReader(stream))
    words = len(captioner.load(tmp_path / "hard").vocabulary)
    assert first == pytest.approx(-np.log(words), rel=1e-4)  # nothing was sampled yet
    assert first < second < third
    assert captioner.load(tmp_path / "hard").about["epoch"] == 2

    with pytest.raises(InputError, match="--soft-epochs 3 leaves none of the 3 epochs"):
        train(hard(soft_epochs=3), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_rmsprop_at_a_constant_rate(
    photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = config(photos, optimizer="rmsprop", schedule="constant", learning_rate=0.004)
    with caplog.at_level(logging.INFO, "captioner"):
        train(chosen, tmp_path / "run")
    with (tmp_path / "run" / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx([0.004] * EPOCHS)
    assert float(rows[-1]["word_loss"]) < float(rows[0]["word_loss"])
    assert "--optimizer rmsprop --learning-rate 0.004 --schedule constant" in caplog.text


def test_start_from_a_trained_model(photos: Path, finished: Path, tmp_path: Path) -> None:
    """Fine-tuning: weights and vocabulary of the other model, hard attention from soft weights."""
    soft = captioner.load(finished)
    fine = config(photos, epochs=1, learning_rate=1e-9, start_from=finished)
    fine = dataclasses.replace(
        fine,
        vocabulary=VocabularyConfig(min_count=6),
        model=dataclasses.replace(fine.model, attention="hard"),
    )
    train(fine, tmp_path / "hard")
    hard = captioner.load(tmp_path / "hard")
    assert hard.decoder.attention_kind == "hard"
    assert hard.vocabulary.words == soft.vocabulary.words
    for mine, theirs in zip(hard.decoder.weights, soft.decoder.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)

    wider = dataclasses.replace(fine, model=dataclasses.replace(fine.model, units=13))
    with pytest.raises(InputError, match="its layers have other shapes; give --units"):
        train(wider, tmp_path / "wider")


def test_start_from_learns_the_words_of_other_photos(
    finished: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(9):
        Image.new("RGB", (60, 60), "yellow").save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a yellow wall\nyellow cheese\n")
    start = captioner.load(finished)
    run = tmp_path / "runs" / "more"
    scores = itertools.count()  # one dev photo has no CIDEr: that the last epoch is kept
    monkeypatch.setattr(
        training._Run, "score_dev", lambda self: {"bleu_4": 0.0, "cider": float(next(scores))}
    )
    options = config(tmp_path, epochs=30, start_from=finished, views=1)
    with caplog.at_level(logging.INFO, "captioner"):
        train(options, run)
    model = captioner.load(run)
    known = len(start.vocabulary)
    assert model.vocabulary.words == (*start.vocabulary.words, "yellow", "cheese")
    assert f"{known + 2} words, those of {finished} and 2 more from train" in caplog.text
    assert "yellow" in captioner.describe(model, tmp_path / "0.png").words


@pytest.mark.parametrize(
    ("told", "expected"),
    [("efficientnet-lite2", "efficientnet-lite2"), ("../../x", "efficientnet-lite0"), (7, None)],
)
def test_the_encoder_of_a_start_is_named_but_not_believed(
    photos: Path, finished: Path, tmp_path: Path, told: object, expected: str | None
) -> None:
    start = captioner.load(finished)
    start.about["encoder"] = told
    save_model(start, tmp_path / "start.keras")
    run = tmp_path / "a" / "b" / "run"
    train(config(photos, epochs=1, start_from=tmp_path / "start.keras"), run)
    saved = json.loads((run / "config.json").read_text())["model"]["encoder"]
    assert saved == (expected or "efficientnet-lite0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "start.keras"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b"]


def test_early_stopping(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.1, 0.3, 0.2, 0.3, 0.9])
    monkeypatch.setattr(
        training._Run, "score_dev", lambda self: {"bleu_4": 0.0, "cider": next(scores)}
    )
    train(config(photos, epochs=5, patience=2), tmp_path / "run")
    with (tmp_path / "run" / "history.csv").open() as stream:
        assert [float(row["cider"]) for row in csv.DictReader(stream)] == [0.1, 0.3, 0.2, 0.3]
    assert captioner.load(tmp_path / "run").about["epoch"] == 2


def test_the_last_epoch_may_be_kept(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.9, 0.1, 0.3])
    monkeypatch.setattr(
        training._Run, "score_dev", lambda self: {"bleu_4": 0.0, "cider": next(scores)}
    )
    with caplog.at_level(logging.INFO, "captioner"):
        train(config(photos, epochs=3, patience=1, monitor="none"), tmp_path / "run")
    about = captioner.load(tmp_path / "run").about
    assert (about["epoch"], about["dev"]["cider"]) == (3, 0.3)
    assert "best: epoch 3 →" in caplog.text


def test_errors_come_before_anything_is_written(
    photos: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match="holds a run already; add --resume"):
        train(config(photos), finished)
    with pytest.raises(InputError, match="no run to resume here"):
        train(config(photos), tmp_path / "none", resume=True)
    with pytest.raises(InputError, match="--data PATH is needed"):
        train(TrainConfig(), tmp_path / "none")
    with pytest.raises(InputError, match="--epochs 0 is for --start-from with --optimize-cider"):
        train(config(photos, epochs=0, optimize_cider=1), tmp_path / "none")
    assert main(["train", "--data", str(tmp_path / "gone"), "--out", str(tmp_path / "none")]) == 2
    assert "gone does not exist" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_training_by_score_alone(photos: Path, finished: Path, tmp_path: Path) -> None:
    train(config(photos, start_from=finished, epochs=0, optimize_cider=1), tmp_path / "run")
    with (tmp_path / "run" / "history.csv").open() as stream:
        [row] = csv.DictReader(stream)
    assert float(row["reward"]) >= 0


def test_a_vocabulary_of_nothing_is_explained(photos: Path, tmp_path: Path) -> None:
    rare = TrainConfig(DataConfig(data=photos), VocabularyConfig(min_count=1000))
    with pytest.raises(InputError, match="lower --min-count"):
        train(rare, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # or the next try would be told to resume it


def test_a_fine_tuned_run_resumes_without_what_it_started_from(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start.keras"
    start.write_bytes((finished / "captioner.keras").read_bytes())
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6)  # in the second epoch
        with pytest.raises(KeyboardInterrupt):
            train(config(photos, epochs=2, start_from=start), tmp_path / "run")
    start.unlink()
    train(TrainConfig(), tmp_path / "run", resume=True)
    words = captioner.load(finished).vocabulary.words
    assert captioner.load(tmp_path / "run").vocabulary.words == words


def test_the_encoder_learns_too_and_more_slowly(
    photos: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"start_from": finished, "fine_tune": True, "encoder_learning_rate": 1e-3}
    whole = tmp_path / "whole"
    train(config(photos, **options), whole)
    before, after = captioner.load(finished), captioner.load(whole)

    def change(layers: str) -> float:
        pairs = zip(getattr(before, layers).weights, getattr(after, layers).weights, strict=True)
        return max(float(np.abs(one - other).max()) for one, other in pairs)

    assert 0 < change("encoder") < 0.1 * change("decoder")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            train(config(photos, **options), run)
    train(TrainConfig(), run, resume=True)
    for mine, expected in zip(weights(run), weights(whole), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)
    message = "--fine-tune and --optimize-cider exclude each other"
    with pytest.raises(InputError, match=message):
        train(config(photos, **options, optimize_cider=1), tmp_path / "both")


def test_training_by_score_goes_on_from_the_best_epoch(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"epochs": 2, "optimize_cider": 2, "cider_samples": 3, "cider_learning_rate": 1e-3}
    whole = tmp_path / "whole"
    train(config(photos, **options), whole)
    with (whole / "history.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["reward"] != "" for row in rows] == [False, False, True, True]
    assert [float(row["learning_rate"]) for row in rows[2:]] == pytest.approx([1e-3, 1e-3])
    assert (whole / "curves.png").is_file()

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 10)  # of 4 per epoch: in the first epoch by score
        with pytest.raises(KeyboardInterrupt):
            train(config(photos, **options), run)
    train(TrainConfig(), run, resume=True)
    for mine, expected in zip(weights(run), weights(whole), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)
