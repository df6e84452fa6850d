"""The benchmark: what it counts, and that it runs. What it measures is asserted nowhere."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from captioner import datasets, precision
from captioner.__main__ import main
from captioner.batches import Batches
from captioner.bench import captions, step_flops, table
from captioner.config import DataConfig
from captioner.datasets import Example
from captioner.features import Features
from captioner.text import Vocabulary

NAMES = [
    *("machine.float32_gflops", "machine.bfloat16_gflops"),
    *("encode.photos_per_s", "extract.photos_per_s"),
    "train.soft_additive.captions_per_s",
    "train.soft_scaled_dot.captions_per_s",
    "train.hard_additive.captions_per_s",
    "train.soft_additive.share_of_float32",
    *("caption.greedy.photos_per_s", "caption.beam_3.photos_per_s"),
    *("caption.one_photo.median_ms", "caption.one_photo.p95_ms"),
    *("caption.cold_shell_s", "import_tensorflow_s", "help_s", "caption.load_model_s"),
    *("memory.train_peak_mb", "memory.train_4x_photos_peak_mb"),
    *("memory.caption_peak_mb", "memory.caption_4x_photos_peak_mb"),
]


@pytest.mark.slow
def test_bench_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--out", str(tmp_path / "bench.json")]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    for name in NAMES:
        least, greatest = report["spread"][name]
        assert 0 < least <= report[name] <= greatest, name
    assert report["quick"] is True
    printed = capsys.readouterr().out
    assert all(name in printed for name in NAMES)
    assert "these figures mean nothing" in printed


def test_operations_of_a_step() -> None:
    """B=2, 30 words, L=7, D=11, H=A=E=13, V=17, counted by hand."""
    sizes = (2, 30, 7, 11, 13, 17)
    words, context = (13 + 13) * 52, 11 * 52
    head = 13 * 13 + 11 * 13 + 13 * 17  # 533
    initial = 2 * 11 * 13  # 286
    expected = 2 * (3 * 30 * (words + head) + 2 * 2 * (initial + context))
    assert step_flops(*sizes, attention="none") == expected
    look = 13 * 13 + 7 * 13 + 13 + 7 * 11  # query, scores, gate, weighted sum
    keys = 7 * 11 * 13
    for score, less in (("additive", 0), ("scaled-dot", 0), ("general", 13 * 13)):
        each = words + context + head + look - less
        expected = 2 * (3 * 30 * each + 2 * 2 * (initial + keys))
        assert step_flops(*sizes, score=score) == expected


def test_captions_are_as_long_as_flickr8k(data_root: Path) -> None:
    class NoFeatures(Features):
        def __init__(self) -> None:
            """Nothing is on disk."""

        def locate(self, photos: Sequence[Path]) -> list[tuple[int, int]]:
            return [(0, 0) for _ in photos]

    train = datasets.from_options(DataConfig(data=data_root / "flickr8k"), "x").split("train")

    def batches(examples: Sequence[Example]) -> tuple[Counter[int], float]:
        """How many batches have how many steps, and the mean words of a caption."""
        words = Vocabulary.build((text for one in examples for text in one.captions), min_count=5)
        all_of_them = Batches([NoFeatures()], examples, words, 32, 24, 1)
        tokens = [all_of_them.tokens(number) for number in range(len(all_of_them))]
        mean = np.mean([np.count_nonzero(one[..., 1:], axis=-1).mean() for one in tokens[:-1]])
        return Counter(one.shape[2] - 1 for one in tokens), float(mean)

    (real, real_mean), (drawn, drawn_mean) = batches(train), batches(captions(6000, 2542))
    assert drawn_mean == pytest.approx(real_mean, rel=0.02)
    for steps in (12, 16, 20, 24):
        assert abs(drawn[steps] - real[steps]) <= 8, steps


def test_table_says_when_figures_mean_nothing() -> None:
    report = {
        "machine.float32_gflops": 290.123, "spread": {"machine.float32_gflops": (280.0, 300.0)},
        "processors": 2, "precision": "float32", "tensorflow": "2.21", "keras": "3.15",
        "quick": True,
    }  # fmt: skip
    lines = table(report).splitlines()
    assert lines[1].split() == ["machine.float32_gflops", "290.1", "280", "..", "300"]
    assert lines[-1].endswith("these figures mean nothing")
    assert "nothing" not in table({**report, "quick": False})


@pytest.mark.parametrize(
    ("float32", "bfloat16", "expected"),
    [(10, 3, "mixed_bfloat16"), (10, 9, "float32"), (3, 10, "float32")],
)
def test_precision_is_the_one_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float, expected: str
) -> None:
    seconds = {"float32": float32, "bfloat16": bfloat16}
    monkeypatch.setattr(precision, "product_seconds", lambda dtype, *_: [seconds[dtype.name], 99])
    precision.best_precision.cache_clear()
    try:
        assert precision.best_precision() == expected
    finally:
        precision.best_precision.cache_clear()
