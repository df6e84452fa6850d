"""The web page and its HTTP API: uploaded photos to captions, to look at and to download.

Gradio answers every request in a thread of its own. The model works for one of them at a time, and
a few read or draw photos meanwhile; the others wait in its queue, so that memory stays bounded.
"""

import html
import json
import random
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from captioner import sidecar, viewer
from captioner.caption import Caption
from captioner.config import SearchConfig
from captioner.errors import InputError
from captioner.files import write_text
from captioner.inference import Writer, describe_files

__all__ = ["build"]

PAGE_PHOTOS = 12  # shown at a time, each of up to 150 kB
BATCH_PHOTOS = 200
CHUNK = 8  # photos of a batch, after which others have their turn
AT_A_TIME = 2  # requests whose photos are read and drawn
WAITING = 64  # requests, at most
KEEP_SECONDS = 3600  # that uploads and results stay on disk
LARGEST_BEAM = 10
BOLDEST = 1.5  # temperature

REFUSED = "Not captioned"

STYLE = """
iframe.photos, .nothing { display: block; width: 100%; box-sizing: border-box;
    border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg); }
iframe.photos { height: max(34rem, 88vh); }
#shown .html-container { padding: 0; }
.nothing { border-style: dashed; padding: 5rem 1rem; text-align: center;
    color: var(--body-text-color-subdued); }
footer .divider { display: none; }
"""
NOTHING = '<div class="nothing">Your photos will be here, and below each its caption.</div>'


def build(writers: Mapping[str, Writer], folder: Path) -> gr.Blocks:
    """The page, ready to be launched.

    Args:
        writers: models, by the names that they are chosen by; the first is chosen already.
        folder: where Gradio keeps uploads (`GRADIO_TEMP_DIR`), for results too.
    """
    answers = _Answers(writers, folder)
    first = next(iter(writers))
    tuned = SearchConfig().completed(writers[first].model.decoding)
    with gr.Blocks(
        title="captioner",
        analytics_enabled=False,
        delete_cache=(KEEP_SECONDS // 4, KEEP_SECONDS),
        fill_width=True,
    ) as page:
        gr.Markdown(
            "# captioner\nCaptions for photos, and where the model looked for every word. "
            "Nothing leaves the computer that this page comes from."
        )
        with gr.Accordion("Model, beam, temperature", open=False), gr.Row():
            options = [
                gr.Dropdown(list(writers), value=first, label="Model"),
                gr.Slider(
                    *(1, LARGEST_BEAM),
                    value=min(tuned.beam, LARGEST_BEAM),
                    step=1,
                    precision=0,
                    label="Beam",
                    info="Captions kept while searching; 1 is greedy.",
                ),
                gr.Slider(
                    *(1, LARGEST_BEAM),
                    value=min(3, tuned.beam),
                    step=1,
                    precision=0,
                    label="Captions",
                    info="How many of each photo, best first; at most the beam.",
                ),
                gr.Slider(
                    *(0, BOLDEST),
                    value=0,
                    step=0.1,
                    precision=1,
                    label="Temperature",
                    info="0 searches for the best; above, words are drawn: low is safe, 1 bold.",
                ),
            ]
        with gr.Tab("Photos"), gr.Row():
            with gr.Column(scale=1, min_width=280):
                photos = _uploads(label="Photos", height=220)
                with gr.Accordion("Camera", open=False):
                    camera = _uploaded_only(
                        gr.Image(
                            sources=["webcam"],
                            type="filepath",
                            image_mode=None,
                            show_label=False,
                            webcam_options=gr.WebcamOptions(mirror=False),
                        )
                    )
                again = gr.Button("Caption again", variant="primary")
            with gr.Column(scale=3, min_width=320):
                shown = gr.HTML(NOTHING, elem_id="shown")
        with gr.Tab("Many photos"):
            many = _uploads(label=f"Up to {BATCH_PHOTOS} photos", height=220)
            start = gr.Button("Caption all", variant="primary")
            done = gr.Textbox(label="Progress", lines=1, max_lines=8, interactive=False)
            table = gr.Dataframe(
                headers=["photo", "caption", "score"],
                datatype=["str", "str", "number"],
                label="Captions",
                interactive=False,
                wrap=True,
            )
            files = gr.File(label="captions.jsonl, captions.csv", file_count="multiple")
        gr.on(
            [photos.upload, camera.input, again.click],
            answers.show,
            [photos, camera, *options],
            shown,
            concurrency_limit=AT_A_TIME,
            concurrency_id="photos",
            api_visibility="private",
        )
        # What other programs call has no place on the page but in its documentation.
        photo = _uploaded_only(gr.File(label="photo", visible=False))
        result = gr.JSON(label="captions", visible=False)
        gr.Button(visible=False).click(
            answers.caption,
            [photo, *options],
            result,
            concurrency_id="photos",
            api_name="caption",
        )
        start.click(
            answers.caption_all,
            [many, *options],
            [done, table, files],
            concurrency_limit=1,
            api_name="caption_all",
        )
    _refuse_quietly(page)
    return page.queue(max_size=WAITING)


def _refuse_quietly(page: gr.Blocks) -> None:
    """Tells whoever sends what no page sends, and not the terminal of whoever serves.

    Forged paths and what is no option make Gradio raise all kinds of things before any of our own
    functions is called.
    """
    preprocess = page.preprocess_data

    async def checked(*arguments: Any, **options: Any) -> Any:
        try:
            return await preprocess(*arguments, **options)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Exception as error:
            raise _refusal(
                "what was sent cannot be used: give a photo by the path that its upload returned, "
                "with a name that does not start with a dot, and options as the page has them"
            ) from error

    page.preprocess_data = checked


def _uploads(**arguments: Any) -> gr.File:
    """Where photos are dropped."""
    # Not every browser knows by itself that HEIC files are images.
    kinds = ["image", ".heic", ".heif"]
    return _uploaded_only(gr.File(file_count="multiple", file_types=kinds, **arguments))


def _uploaded_only(component: Any) -> Any:
    """Has a component refuse URLs, which clients may name and Gradio would fetch, and folders.

    Not a subclass, since of those Gradio writes a `.pyi` beside the source.
    """
    move = component.async_move_resource_to_block_cache

    async def move_uploaded(file: Any) -> str | None:
        if str(file).startswith(("http://", "https://")):
            raise _refusal(f"{file}: is not fetched; upload the photo itself")
        # Of a folder, Gradio's tidying up would come to grief.
        if file is not None and not Path(file).is_file():
            raise _refusal("what was sent is no file: upload the photo first")
        return await move(file)

    component.async_move_resource_to_block_cache = move_uploaded
    return component


class _Answers:
    """What the page's events call; each call with photos and options of its own.

    Args:
        writers: models by name.
        folder: for files that are downloaded.
    """

    def __init__(self, writers: Mapping[str, Writer], folder: Path) -> None:
        self._writers = writers
        self._folder = folder
        self._lock = threading.Lock()

    def show(
        self,
        uploads: list[str] | None,
        camera: str | None,
        model: str,
        beam: int,
        n_best: int,
        temperature: float,
    ) -> str:
        """The page of the photos, as HTML of an inner frame."""
        photos = [*(uploads or []), *([camera] if camera else [])]
        if not photos:
            return NOTHING
        paths = _checked(photos, PAGE_PHOTOS, "; “Many photos” takes more")
        described, failed = [], []
        options = _options(beam, n_best, temperature)
        for _, found in self._describe(paths, model, options, extras=paths):
            if isinstance(found, InputError):
                failed.append(str(found))
            else:
                described.append(found)
        if not described:
            raise _refusal("\n".join(failed))
        for message in failed:
            gr.Warning(message, title=REFUSED)
        notes = [[f"{one.text} ({one.score:.2f})" for one in rest] for _, *rest in described]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "page.html"
            best = {model: [first for first, *_ in described]}
            viewer.save_page(best, path, title=model, notes=notes)
            content = html.escape(path.read_text(encoding="utf-8"))
        # Without `allow-same-origin` its script reaches nothing of the page around it.
        return (
            '<iframe class="photos" title="Photos and captions" sandbox="allow-scripts" '
            f'srcdoc="{content}"></iframe>'
        )

    def caption(
        self, photo: str | None, model: str, beam: int, n_best: int, temperature: float
    ) -> dict[str, Any]:
        """Captions of one photo, best first, each with its score, and for each of its words the
        probability, the gate, and the attention: rows of regions that sum to 1. The window is what
        they cover of the photo: left, top, right and bottom in pixels.
        """
        paths = _checked([photo] if photo else None, 1)
        ((path, found),) = self._describe(paths, model, _options(beam, n_best, temperature))
        if isinstance(found, InputError):
            raise _refusal(str(found))
        answer = _as_json(path, found)
        geometry = found[0].geometry
        answer["photo_size"] = [geometry.photo_width, geometry.photo_height]
        answer["window"] = list(geometry.window)
        for caption, one in zip(answer["captions"], found, strict=True):
            maps = one.attention
            caption["attention"] = None if maps is None else maps.astype(float).round(5).tolist()
        return answer

    def caption_all(
        self, photos: list[str] | None, model: str, beam: int, n_best: int, temperature: float
    ) -> Iterator[tuple[str, list[list[Any]], list[str] | None]]:
        """Captions of many photos, as a table and as two files: JSON lines and CSV. While it goes
        on, the files are missing.
        """
        paths = _checked(photos, BATCH_PHOTOS)
        options = _options(beam, n_best, temperature)
        answers: list[dict[str, Any]] = []
        problems: list[str] = []
        for first in range(0, len(paths), CHUNK):
            for path, found in self._describe(paths[first : first + CHUNK], model, options):
                if isinstance(found, InputError):
                    problems.append(str(found))
                else:
                    answers.append(_as_json(path, found))
            count = len(answers) + len(problems)
            told = "\n".join([f"{count} of {len(paths)} photos", *problems])
            rows = [[one["photo"], one["caption"], one["captions"][0]["score"]] for one in answers]
            yield told, rows, None
        yield told, rows, self._save(answers) if answers else None

    def _save(self, answers: Sequence[Mapping[str, Any]]) -> list[str]:
        """Writes captions as JSON lines and as CSV, to be downloaded."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        lines, rows = folder / "captions.jsonl", folder / "captions.csv"
        write_text(lines, "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in answers))
        sidecar.save_table(((folder / one["photo"], one["captions"]) for one in answers), rows)
        return [str(lines), str(rows)]

    def _describe(
        self,
        paths: Sequence[Path],
        model: str,
        options: SearchConfig,
        *,
        extras: Sequence[Path] = (),
    ) -> list[tuple[Path, list[Caption] | InputError]]:
        """As `describe_files`; errors name photos as their owner does."""
        with self._lock:
            writer = self._writers[model]
            found = list(describe_files(writer, paths, options, extras=set(extras)))
        return [
            (path, InputError(str(one).replace(str(path), path.name)))
            if isinstance(one, InputError)
            else (path, one)
            for path, one in found
        ]


def _checked(photos: list[str] | None, most: int, instead: str = "") -> list[Path]:
    """The photos' files; refuses to go on with none, or with too many."""
    if not photos:
        raise _refusal("no photo yet: upload one first")
    if len(photos) > most:
        raise _refusal(f"{len(photos)} photos: here it may be {most} at a time{instead}")
    return [Path(photo) for photo in photos]


def _options(beam: int, n_best: int, temperature: float) -> SearchConfig:
    if temperature == 0:
        return SearchConfig(beam=beam, n_best=min(n_best, beam))
    return SearchConfig(
        n_best=n_best, sample=True, temperature=temperature, seed=random.randrange(2**31)
    )


def _as_json(path: Path, captions: Sequence[Caption]) -> dict[str, Any]:
    """As `sidecar.as_json`, but of the photo's name alone: its folder is the server's."""
    return {**sidecar.as_json(captions), "photo": path.name}


def _refusal(message: str) -> gr.Error:
    """An error that is shown to whoever asked, and does not concern whoever serves."""
    return gr.Error(message, title=REFUSED, print_exception=False)
