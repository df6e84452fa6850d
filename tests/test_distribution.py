"""Training by several processes and devices: equal to one, as users start it."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from captioner.batches import Batches
from captioner.config import DataConfig, TrainConfig
from captioner.datasets import Example
from captioner.distribution import Team
from captioner.errors import InputError
from captioner.text import Vocabulary
from captioner.training import train

PROJECT = Path(__file__).parents[1]
COLOURS = ("red", "green", "blue", "white", "black", "orange", "purple")
OPTIONS = (
    *("--weights", "none", "--image-size", "64", "--units", "11", "--attention-units", "5"),
    *(
        "--embedding-units",
        "3",
        "--min-count",
        "1",
        "--batch-photos",
        "4",
        "--precision",
        "float32",
    ),
    # Clipped at every step. AdamW would make much of what differs by rounding near 0.
    *("--epochs", "2", "--clip", "0.1", "--learning-rate", "0.002", "--optimizer", "rmsprop"),
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen one-coloured photos with two captions each: 11 or so to train on, so that the last
    batch of four leaves one worker without photos."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(14):
        colour = COLOURS[number % 7]
        Image.new("RGB", (80 + number, 70), colour).save(folder / f"{number}.png")
        longer = " and a door" if number % 3 == 0 else ""
        (folder / f"{number}.txt").write_text(f"a {colour} wall{longer}\n{colour} paint\n")
    return folder


def tf_config(worker: int, ports: tuple[int, ...]) -> str:
    """Of one of several workers on loopback."""
    machines = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": worker}
    return json.dumps({"cluster": {"worker": machines}, "task": task})


def start(
    out: Path, *options: str, worker: int = 0, ports: tuple[int, ...] = ()
) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ports:
        environment["TF_CONFIG"] = tf_config(worker, ports)
    return subprocess.Popen(
        [sys.executable, "train.py", "--out", str(out), *options],
        cwd=PROJECT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen) -> list[str]:
    said = [process.communicate(timeout=500)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return said


def free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports


def together(out: Path, *options: str) -> list[str]:
    """Two workers on loopback, as on two machines."""
    ports = free_ports(2)
    return finish(*(start(out, *options, worker=worker, ports=ports) for worker in range(2)))


def weights(run: Path) -> list[np.ndarray]:
    with np.load(run / "checkpoint" / "state.npz") as arrays:
        return [arrays[name] for name in arrays.files if name.startswith("variable")]


def column(run: Path, name: str) -> list[float]:
    with (run / "history.csv").open() as stream:
        return [float(row[name]) for row in csv.DictReader(stream)]


def losses(run: Path) -> list[float]:
    return column(run, "loss")


def test_one_process_is_a_team() -> None:
    team = Team()
    assert (team.workers, team.worker, team.replicas, team.is_chief) == (1, 0, 1, True)
    batch = {"tokens": np.arange(6)}
    assert team.place(batch) is batch
    assert team.all(7).tolist() == [7] and team.chiefs(0.25) == 0.25


def test_machines_must_be_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for config in (None, "", "{", "[]", '{"cluster": {"worker": 3}}'):
        if config is None:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        else:
            monkeypatch.setenv("TF_CONFIG", config)
        with pytest.raises(InputError, match="TF_CONFIG must list the machines"):
            Team("multiworker")
        assert Team("auto").workers == 1
    options = TrainConfig(DataConfig(tmp_path))
    monkeypatch.setattr(
        Team, "__init__", lambda self, name: vars(self).update(replicas=3, worker=0)
    )
    monkeypatch.setattr(Team, "workers", 1, raising=False)
    with pytest.raises(InputError, match="--batch-photos 32: 3 devices share a batch; give a mult"):
        train(options, tmp_path / "run")


class Regions:
    """Regions that tell whose they are."""

    def locate(self, photos: list[Path]) -> list[int]:
        return [int(photo.stem) for photo in photos]

    def read(self, places: list[int]) -> np.ndarray:
        return np.array([np.full((2, 3), place + 1) for place in places], np.float16)


def test_shares_of_a_batch_are_the_batch() -> None:
    """Thirteen photos in batches of six for three: of the last one, two have nothing to do."""
    examples = [
        Example(str(number), Path(f"{number}.jpg"), ("a " * (1 + number % 7),), "train")
        for number in range(13)
    ]
    vocabulary = Vocabulary(["a"])
    whole = Batches([Regions()], examples, vocabulary, 6, 9, 5)
    shares = [Batches([Regions()], examples, vocabulary, 6, 9, 5, (n, 3)) for n in range(3)]
    empty = 0
    for index in range(len(whole)):
        x, y = whole[index]
        parts = [share[index] for share in shares]
        for name in x:
            np.testing.assert_array_equal(
                np.concatenate([part[0][name] for part in parts]), x[name]
            )
        np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), y)
        empty += sum(not len(share.photos(index)) for share in shares)
    assert empty == 2 and {share.per_epoch for share in shares} == {3}


@pytest.mark.slow
def test_two_workers_train_as_one_does(photos: Path, tmp_path: Path) -> None:
    """With the clipped sum of gradients, moving average, teacher of alpha and regulariser."""
    options = (
        *("--data", str(photos), *OPTIONS, "--dropout", "0", "--average", "0.9"),
        *("--grounding-weight", "0.5", "--positions", "--label-smoothing", "0.1"),
    )
    finish(start(tmp_path / "one", *options))
    chief, other = together(tmp_path / "two", *options, "--strategy", "multiworker")
    for mine, expected in zip(weights(tmp_path / "two"), weights(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)
    word_losses = [column(tmp_path / run, "word_loss") for run in ("one", "two")]
    np.testing.assert_allclose(*word_losses, rtol=1e-4)
    assert "Epoch 2: loss" in chief and "Epoch 2: loss" in other


@pytest.mark.slow
def test_hard_attention_and_training_by_score_on_two_workers(photos: Path, tmp_path: Path) -> None:
    """They draw at random, so not as one process does; the workers' weights are equal all the same:
    each saves what it ends with."""
    script = tmp_path / "train_and_tell.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import numpy as np
            from captioner import training
            from captioner.__main__ import main

            where, options = sys.argv[1], sys.argv[2:]
            finished = training._Run.train

            def train(run):
                finished(run)
                arrays = {str(i): v.numpy() for i, v in enumerate(run._variables())}
                np.savez(f"{where}/{run.team.worker}.npz", **arrays)

            training._Run.train = train
            sys.exit(main(["train", *options]))
            """
        )
    )
    ports = free_ports(2)
    options = (
        *("--data", str(photos), "--out", str(tmp_path / "run"), *OPTIONS),
        *("--attention", "hard", "--soft-epochs", "1", "--optimize-cider", "1"),
    )
    processes = []
    for worker in range(2):
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), str(tmp_path), *options],
                cwd=PROJECT,
                env={
                    **os.environ,
                    "TF_CONFIG": tf_config(worker, ports),
                    "PYTHONPATH": str(PROJECT),
                },
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    finish(*processes)
    with np.load(tmp_path / "0.npz") as chief, np.load(tmp_path / "1.npz") as other:
        assert chief.files == other.files
        for name in chief.files:
            np.testing.assert_array_equal(chief[name], other[name])
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.slow
def test_a_lost_worker_is_named_and_the_run_goes_on(photos: Path, tmp_path: Path) -> None:
    run, ports = tmp_path / "run", free_ports(2)
    options = ("--data", str(photos), *OPTIONS, "--epochs", "400", "--patience", "400")
    chief, other = (start(run, *options, worker=worker, ports=ports) for worker in range(2))
    deadline = time.monotonic() + 200
    while not (run / "history.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    other.send_signal(signal.SIGKILL)
    said = chief.communicate(timeout=200)[1]
    other.communicate()
    assert chief.returncode == 2, said
    assert "worker 0 of 2 lost another one and stopped" in said and "Traceback" not in said

    saved = json.loads((run / "config.json").read_text())
    saved["training"]["epochs"] = len(losses(run)) + 2
    (run / "config.json").write_text(json.dumps(saved))
    said = together(run, "--resume")[0]
    assert "resuming at epoch" in said
    assert len(losses(run)) == saved["training"]["epochs"]


@pytest.mark.slow
def test_two_devices_of_one_machine_train_as_one_does(photos: Path, tmp_path: Path) -> None:
    script = (
        "import sys, tensorflow as tf; from captioner.__main__ import main; "
        "cpu = tf.config.list_physical_devices('CPU')[0]; "
        "two = [tf.config.LogicalDeviceConfiguration()] * 2; "
        "tf.config.set_logical_device_configuration(cpu, two); "
        "sys.exit(main(['train', *sys.argv[1:]]))"
    )
    options = ("--data", str(photos), *OPTIONS, "--dropout", "0")
    finish(start(tmp_path / "one", *options))
    command = [sys.executable, "-c", script, "--out", str(tmp_path / "two"), *options]
    subprocess.run([*command, "--strategy", "mirrored"], cwd=PROJECT, check=True)
    for mine, expected in zip(weights(tmp_path / "two"), weights(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="keras-team/keras#20585; once mended, `fit` could be used")
def test_keras_fit_works_on_workers() -> None:
    """Tells when our own loop is not needed any more."""
    script = """
import keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 2)))).batch(4)
model.fit(data, verbose=0)
"""
    ports = free_ports(2)
    processes = []
    for worker in range(2):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script],
                env={**os.environ, "TF_CONFIG": tf_config(worker, ports)},
                stderr=subprocess.DEVNULL,
            )
        )
    assert [process.wait(200) for process in processes] == [0, 0]
