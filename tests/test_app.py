"""The web page and its HTTP API, as people and programs use them: one server for all tests.

It takes longer to start than any test that asks it: all of these are marked `slow`.
"""

import csv
import importlib.util
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from mutations import COUNT, mutated
from PIL import ExifTags, Image

import captioner
from captioner.__main__ import main
from captioner.model import Captioner, save_model
from captioner.serve import LARGEST_UPLOAD, _by_name

START_SECONDS = 120
ANSWER_SECONDS = 60


@pytest.fixture(scope="module", autouse=True)
def gradio() -> None:
    """In CI it must be there."""
    if importlib.util.find_spec("gradio") is None:
        reason = 'no Gradio: pip install "gradio>=6.31"'
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@dataclass(frozen=True)
class Server:
    """A server that runs, the model in it, and the folder that it was started in."""

    url: str
    process: int
    model: Captioner
    folder: Path

    def peak_memory(self) -> int:
        """Bytes."""
        lines = Path(f"/proc/{self.process}/status").read_text().splitlines()
        (kilobytes,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return 1024 * int(kilobytes)

    def post(self, path: str, body: bytes, kind: str) -> Any:
        request = urllib.request.Request(
            f"{self.url}/gradio_api/{path}", body, {"Content-Type": kind}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            return json.load(response)

    def upload(self, name: str, content: bytes) -> str:
        """The path that the server gives to an uploaded file."""
        head = f'--edge\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'
        body = head.encode() + content + b"\r\n--edge--\r\n"
        (path,) = self.post("upload", body, "multipart/form-data; boundary=edge")
        return path

    def call(self, name: str, photo: dict[str, Any] | None, *options: Any) -> tuple[str, Any]:
        """An endpoint's answer: `complete` with what it returns, or `error` with what was said."""
        body = json.dumps({"data": [photo, *options]}).encode()
        return self.answer(name, self.post(f"call/{name}", body, "application/json")["event_id"])

    def answer(self, name: str, event: str) -> tuple[str, Any]:
        with urllib.request.urlopen(
            f"{self.url}/gradio_api/call/{name}/{event}", timeout=ANSWER_SECONDS
        ) as response:
            *_, kind, data = [line for line in response.read().decode().splitlines() if line]
        return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def caption(self, path: str, *options: Any) -> Any:
        kind, data = self.call("caption", file(path), *options)
        assert kind == "complete", data
        return data[0]


def file(path: str) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def server(module_tiny_encoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = [f"word{number}" for number in range(13)]
    model = Captioner(module_tiny_encoder, words, units=11, attention_units=5, embedding_units=3)
    # Untrained it would write the same word of any photo, after looking everywhere alike.
    random = np.random.default_rng(3)
    model.set_weights([random.normal(size=weights.shape) for weights in model.get_weights()])
    folder = tmp_path_factory.mktemp("server")
    (folder / "tmp").mkdir()
    save_model(model, folder / "tiny.keras")
    port = free_port()
    command = [sys.executable, "-m", "captioner", "serve", "--port", str(port)]
    with (
        (folder / "said").open("wb") as said,
        subprocess.Popen(
            [*command, "--model", str(folder / "tiny.keras"), "--model", "photo"],
            cwd=folder,
            stderr=said,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(captioner.__file__).parents[1]),
                "TMPDIR": str(folder / "tmp"),
                "http_proxy": "http://127.0.0.1:9",  # where nobody is: it calls nobody
            },
        ) as process,
    ):
        end = time.monotonic() + START_SECONDS
        while "page: http" not in (folder / "said").read_text():
            assert process.poll() is None and time.monotonic() < end, (folder / "said").read_text()
            time.sleep(0.2)
        yield Server(f"http://127.0.0.1:{port}", process.pid, model, folder)
        assert process.poll() is None
        assert [path.name.startswith("captioner-") for path in (folder / "tmp").iterdir()] == [True]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 130
        assert list((folder / "tmp").iterdir()) == []  # nobody's photos are left
        # What was asked wrongly concerns only who asked.
        assert "Traceback" not in (folder / "said").read_text()


@pytest.fixture(scope="module", autouse=True)
def no_proxy() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        yield


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Callable[..., Any]]:
    """Opens the page in a browser that must find nothing wrong, and asks nobody but the server."""
    complaints: list[str] = []
    contexts = []

    def show(**options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = (f"{server.url}/", "data:", f"blob:{server.url}/")
        page.on(
            "request",
            lambda request: None if request.url.startswith(own) else complaints.append(request.url),
        )
        page.goto(server.url)
        return page

    yield show
    for context in contexts:
        context.close()
    assert complaints == []


def noise(seed: int, size: tuple[int, int] = (50, 40)) -> Image.Image:
    """Blocks of random colours: no two photos alike."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.NEAREST)


def as_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def drop(page: Any, *photos: tuple[str, bytes], where: int = 0) -> None:
    page.locator("input[type=file]").nth(where).set_input_files(
        [{"name": name, "mimeType": "", "buffer": content} for name, content in photos]
    )


@pytest.mark.slow
def test_upload_read_hover_and_see_the_map(open_page: Any, server: Server) -> None:
    photo = noise(1)
    expected = captioner.describe(server.model, photo)
    page = open_page()
    drop(page, ("dog.png", as_bytes(photo)))
    frame = page.frame_locator("iframe.photos")
    words = frame.locator(".sentence button")
    words.first.wait_for()
    assert tuple(words.all_inner_texts()) == expected.words
    assert frame.locator("h2").inner_text() == "dog.png"
    assert frame.locator(".notes li").count() == 2  # the second and the third best
    canvas = frame.locator("canvas")
    assert canvas.is_hidden()
    pictures = []
    for index in (0, len(expected.words) - 1):
        words.nth(index).hover()
        canvas.wait_for()
        pictures.append(canvas.evaluate("(one) => one.toDataURL()"))
        told = frame.locator(".facts").inner_text()
        assert f"p {expected.word_probabilities[index]:.2f}" in told
        assert "instead:" in told
    assert pictures[0] != pictures[1]


@pytest.mark.slow
def test_a_photo_from_a_phone_stands_upright_on_a_phone(open_page: Any, server: Server) -> None:
    heif = pillow_heif.from_pillow(noise(2, (96, 64)).convert("RGB"))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    heif.info["exif"] = exif.tobytes()
    stream = io.BytesIO()
    heif.save(stream)
    page = open_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    drop(page, ("IMG_0001.HEIC", stream.getvalue()))
    image = page.frame_locator("iframe.photos").locator(".stage img")
    image.wait_for()
    assert image.evaluate("(one) => one.naturalWidth < one.naturalHeight")
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow
def test_what_is_no_photo_or_too_large_is_refused_on_the_page(
    open_page: Any, tmp_path: Path
) -> None:
    page = open_page()
    drop(page, ("song.jpg", b"la, la, la"))
    page.get_by_text("song.jpg: is not an image that can be read").wait_for()
    page.reload()
    drop(page, ("letter.jpg", b"Dear Sir or Madam"), ("dog.png", as_bytes(noise(1))))
    page.get_by_text("letter.jpg: is not an image that can be read").wait_for()
    names = page.frame_locator("iframe.photos").locator("h2")
    names.wait_for()
    assert names.all_inner_texts() == ["dog.png"]
    drop(page, ("notes.txt", b"milk, bread"))
    page.get_by_text("Invalid file type: notes.txt").wait_for()
    page.reload()
    huge = tmp_path / "huge.png"
    huge.write_bytes(bytes(LARGEST_UPLOAD + 1))
    page.locator("input[type=file]").first.set_input_files(huge)
    page.get_by_text("exceed").wait_for()


@pytest.mark.slow
def test_many_photos_become_a_table_and_two_files(open_page: Any, server: Server) -> None:
    photos = {f"photo {seed}.png": noise(seed) for seed in range(11)}
    page = open_page()
    page.get_by_role("tab", name="Many photos").click()
    files = [(name, as_bytes(photo)) for name, photo in photos.items()]
    drop(page, *files[:5], ("broken.jpg", b"?"), *files[5:], where=1)
    page.locator("tr.file").nth(11).wait_for()
    page.get_by_role("button", name="Caption all").click()
    saved = []
    for name in ("captions.jsonl", "captions.csv"):
        link = page.locator(f'a[download="{name}"]')
        link.wait_for()
        with page.expect_download() as waiting:
            link.click()
        saved.append(Path(waiting.value.path()).read_text(encoding="utf-8"))
    told = page.get_by_label("Progress").input_value()
    assert told.startswith("12 of 12 photos\nbroken.jpg: is not an image")
    lines = [json.loads(line) for line in saved[0].splitlines()]
    assert [line["photo"] for line in lines] == list(photos)
    for line, photo in zip(lines, photos.values(), strict=True):
        expected = captioner.describe(server.model, photo)
        assert line["caption"] == expected.text
        assert line["captions"][0]["score"] == pytest.approx(expected.score, abs=1e-4)
    rows = list(csv.DictReader(io.StringIO(saved[1])))
    assert [row["photo"] for row in rows] == [name for name in photos for _ in range(3)]
    assert [row["caption"] for row in rows[::3]] == [line["caption"] for line in lines]
    page.get_by_text(lines[0]["caption"], exact=True).first.wait_for()  # in the table


@pytest.mark.slow
def test_twenty_at_once_are_each_told_of_their_own_photo(server: Server) -> None:
    photos = [noise(seed, (3200, 2400)) for seed in range(20)]
    expected = captioner.describe(server.model, photos)
    for one, other in itertools.combinations(expected, 2):
        assert np.abs(one.attention[0] - other.attention[0]).max() > 1e-3
    contents = [as_bytes(photo, compress_level=1) for photo in photos]
    options = ("tiny", 5, 3, 0)
    server.caption(server.upload("first.png", contents[0]), *options)
    before = server.peak_memory()

    def ask(number: int) -> Any:
        return server.caption(server.upload(f"photo-{number}.png", contents[number]), *options)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    # As RGB the photos take 460 MB, each of them 23 MB.
    assert server.peak_memory() - before < 150e6
    for number, (answer, one) in enumerate(zip(answers, expected, strict=True)):
        best, second, _ = answer["captions"]
        assert answer["photo"] == f"photo-{number}.png"
        assert answer["caption"] == best["text"] == one.text
        assert tuple(best["words"]) == one.words
        assert best["score"] >= second["score"]
        for name, values in (
            *(("word_probabilities", one.word_probabilities), ("gate", one.gate)),
            ("attention", one.attention),
        ):
            np.testing.assert_allclose(best[name], values, atol=2e-5, err_msg=f"{number} {name}")
        assert np.shape(second["attention"]) == (len(second["words"]), *server.model.grid)
        assert answer["photo_size"] == [3200, 2400]
        assert answer["window"] == [0, 0, 3200, 2400]


@pytest.mark.slow
def test_temperature_draws_words(server: Server) -> None:
    path = server.upload("dog.png", as_bytes(noise(1)))
    answers = [server.caption(path, "tiny", 1, 5, 1.5)["captions"] for _ in range(4)]
    assert len({tuple(one["text"] for one in captions) for captions in answers}) > 1
    assert len(server.caption(path, "tiny", 1, 3, 0)["captions"]) == 1  # no more than the beam


@pytest.mark.slow
def test_the_shipped_model_is_one_of_several(server: Server, data_root: Path) -> None:
    folder = next(path for path in (data_root / "flickr8k").rglob("*.jpg")).parent
    photo = min(folder.glob("*.jpg"))
    answer = server.caption(server.upload(photo.name, photo.read_bytes()), "photo", 5, 1, 0)
    assert answer["caption"] == captioner.describe(captioner.load(), photo, beam=5).text


def refused(server: Server, photo: dict[str, Any] | None, *options: Any) -> str:
    kind, data = server.call("caption", photo, *(options or ("tiny", 5, 3, 0)))
    assert kind == "error"
    return str(data)


@pytest.mark.slow
def test_the_api_refuses_with_a_message(server: Server) -> None:
    path = server.upload("letter.jpg", b"Dear Sir or Madam")
    said = refused(server, file(path))
    assert "letter.jpg: is not an image that can be read" in said
    assert str(server.folder) not in said
    assert "no photo yet" in refused(server, None)
    good = file(server.upload("dog.png", as_bytes(noise(1))))
    assert "soft is not in the list of choices" in refused(server, good, "soft", 3, 1, 0)
    assert "greater than maximum value 10" in refused(server, good, "tiny", 1000, 1, 0)
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.upload("huge.png", bytes(LARGEST_UPLOAD + 1))
    with caught.value as answer:
        assert answer.code == 413
        assert b"maximum allowed size" in answer.read()


@pytest.mark.slow
def test_hostile_uploads_and_requests(server: Server) -> None:
    """Each is answered or refused, nothing of it is told to whoever serves, and it goes on."""
    photo = as_bytes(noise(1), "JPEG")
    good = file(server.upload("dog.jpg", photo))
    before = (server.folder / "said").read_text()
    for seed in range(COUNT):
        name = mutated(b"../dog.jpg", seed).decode("latin-1")
        name = re.sub(r'[\r\n"]', "_", name)  # those would end the name
        status, path = attempt(server.upload, name, mutated(photo, seed))
        if status == 200:
            assert (server.folder / "tmp") in Path(path).resolve().parents
            status, _ = attempt(server.call, "caption", file(path), "tiny", 3, 1, 0)
        assert status < 500, seed
        body = mutated(json.dumps({"data": [good, "tiny", 3, 1, 0]}).encode(), seed)
        status, answer = attempt(server.post, "call/caption", body, "application/json")
        assert status < 500, (seed, body)
        if status == 200:
            attempt(server.answer, "caption", answer["event_id"])
    assert (server.folder / "said").read_text() == before
    assert server.caption(good["path"], "tiny", 3, 1, 0)["caption"]


def attempt(ask: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """HTTP's status and the answer."""
    try:
        return 200, ask(*arguments)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.slow
def test_nothing_is_read_but_what_was_uploaded(server: Server) -> None:
    secret = server.folder / "secret.png"
    secret.write_bytes(as_bytes(noise(3)))
    for path in (secret, server.folder / "tmp" / ".." / "secret.png", "secret.png"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{server.url}/gradio_api/file={path}")
        with caught.value as answer:
            assert answer.code in (403, 404)
        assert refused(server, file(str(path)))
        refused(server, {"path": str(path)})
    upload = Path(server.upload("dog.png", as_bytes(noise(1))))
    assert "is no file" in refused(server, file(str(upload.parent)))
    said = refused(server, file("https://huggingface.co/photo.png"))
    assert "https://huggingface.co/photo.png: is not fetched; upload the photo itself" in said


@pytest.mark.slow
def test_the_api_describes_itself(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/gradio_api/info") as response:
        endpoints = json.load(response)["named_endpoints"]
    assert list(endpoints) == ["/caption", "/caption_all"]
    names = [one["parameter_name"] for one in endpoints["/caption"]["parameters"]]
    assert names == ["photo", "model", "beam", "n_best", "temperature"]
    assert "the attention" in endpoints["/caption"]["description"]


@pytest.mark.slow
def test_only_this_computer_is_answered(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [row.split() for row in table.splitlines()]
    listening = [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"captioner: port {port}: Address already in use; give another one with --port\n"
    )
    assert main(["serve", "--port", "70000"]) == 2
    assert capsys.readouterr().err == "captioner: --port is 70000: it must be from 1 to 65535\n"


def test_a_missing_extra_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        'captioner: the web page needs Gradio: pip install "gradio>=6.31"\n'
    )


def test_models_of_one_name_are_told_apart() -> None:
    assert _by_name(["runs/soft", Path("new/soft.keras"), "photo"]) == {
        "soft": "runs/soft",
        "new/soft.keras": Path("new/soft.keras"),
        "photo": "photo",
    }
