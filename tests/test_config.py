"""Options: round trip, presets, and requirements that agree."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from captioner.config import (
    PRESETS,
    DataConfig,
    ModelConfig,
    TrainConfig,
    TrainingConfig,
    VocabularyConfig,
    preset,
)
from captioner.errors import InputError

PROJECT = Path(__file__).parents[1]


def test_json_round_trip() -> None:
    config = TrainConfig(
        DataConfig(data=Path("some where/données"), limit=7),
        VocabularyConfig(min_count=2),
        ModelConfig(encoder="vgg19", image_size=256, attention="hard", score="general"),
        TrainingConfig(epochs=3, start_from=Path("runs/soft"), precision="float32"),
    )
    assert TrainConfig.from_json(config.to_json()) == config
    assert TrainConfig.from_json("{}") == TrainConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "run/config.json: not JSON"),
        ('{"model": {"speed": 3}}', "options that this version does not know: speed"),
        ('{"model": 3}', "expected an object for ModelConfig, found 3"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig.from_json(text, "run/config.json")


def test_presets() -> None:
    assert preset("default") == TrainConfig()
    assert preset("paper-soft").model.encoder == preset("paper-hard").model.encoder == "vgg19"
    assert preset("paper-hard").model.attention == preset("flickr8k-hard").model.attention == "hard"
    assert {"photo", "flickr8k-soft", "flickr8k-hard"} < set(PRESETS)  # as the shipped models
    for config in PRESETS.values():
        assert TrainConfig.from_json(config.to_json()) == config
    message = "--preset best: choose one of default, photo, flickr8k-soft, fine-tune, "
    with pytest.raises(InputError, match=message):
        preset("best")


def test_options_are_described_as_they_are_typed() -> None:
    changed = TrainConfig(
        DataConfig(data=Path("my photos")), model=ModelConfig(units=7, positions=True)
    )
    assert changed.described() == ["data: --data 'my photos'", "model: --positions --units 7"]
    assert TrainConfig().described() == []
    complete = "\n".join(TrainConfig().described(complete=True))
    assert "--no-positions" in complete and "--beam" not in complete
    assert "--learning-rate 0.0008" in complete and "--min-count 5" in complete


def test_every_option_is_explained() -> None:
    """tyro takes `--help` from the strings below the fields: none may be missing."""
    source = (PROJECT / "captioner" / "config.py").read_text()
    for cls in (DataConfig, VocabularyConfig, ModelConfig, TrainingConfig):
        for option in dataclasses.fields(cls):
            line = source.index(f"    {option.name}: ", source.index(f"class {cls.__name__}"))
            following = source[source.index("\n", line) + 1 :]
            assert following.lstrip().startswith('"""'), option.name


def test_requirements_agree_with_the_package() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if line and line[0] != "#"] == project["dependencies"]
    assert all(">=" in requirement for requirement in project["dependencies"])


def test_config_is_plain_json() -> None:
    values = json.loads(TrainConfig().to_json())
    assert set(values) == {"data", "vocabulary", "model", "training"}
