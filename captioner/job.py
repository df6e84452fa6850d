"""The `caption` command: photos and folders of them to captions, and to all that is made of them.

Photos of folders that the journal (`captioner.journal`) knows are left out: those whose file is
unchanged, whose captions came of the same model and options, and of which everything that is asked
for is still there. Photos that are named themselves are always captioned, and all photos for a page
that shows them. Nothing is kept in memory of a photo but its name, unless there is such a page.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from captioner import alt_text, animation, inference, overlay, sidecar, viewer
from captioner.caption import Caption
from captioner.config import OutputConfig, SearchConfig
from captioner.errors import InputError
from captioner.files import write_text
from captioner.images import find_photos
from captioner.inference import Writer, describe_files
from captioner.journal import Journal, Made
from captioner.progress import bar, track, working

__all__ = ["Summary", "caption"]

log = logging.getLogger(__name__)

JOURNAL = ".captioner.jsonl"  # in a folder of results
KINDS_SHOWN = 8  # of skipped files, in the summary


@dataclass
class Summary:
    """What became of the files.

    Attributes:
        described: photos captioned now.
        earlier: photos captioned by an earlier call.
        kept: photos captioned now whose own description was left as it is.
        failed: by the reason, how many photos could not be captioned and folders not be searched.
        skipped: by what they are, how many files in the folders are no photos to be captioned.
    """

    described: int = 0
    earlier: int = 0
    kept: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.described:,} described"]
        if self.earlier:
            lines[0] += f", {self.earlier:,} were before"
        if self.kept:
            lines[0] += f"; {self.kept:,} keep the description that they had"
        for name, counts in (("skipped", self.skipped), ("failed", self.failed)):
            if counts:
                kinds = [f"{count:,} {kind}" for kind, count in counts.most_common(KINDS_SHOWN)]
                more = ", …" if len(counts) > KINDS_SHOWN else ""
                lines.append(f"{counts.total():,} {name}: {', '.join(kinds)}{more}")
        return "\n".join(lines)


def caption(
    photos: Sequence[Path],
    model: Path | None,
    options: SearchConfig,
    outputs: OutputConfig | None = None,
) -> Summary:
    """Captions photos, prints the captions and writes what was asked for.

    A photo that cannot be read is named on stderr and the others are captioned all the same.

    Args:
        photos: files, and folders that are searched.
        model: as for `captioner.load`.
        options: how words are chosen.
        outputs: what is written; nothing if not given.

    Raises:
        InputError: no photos, no model, an output that cannot be written, or (after all else is
            done) photos that could not be captioned.
        KeyboardInterrupt: stopped by the user; what was done is kept.
    """
    outputs = outputs or OutputConfig()
    if outputs.alt_text:
        alt_text.check_language(outputs.language)
    if outputs.alt_text == "embed":
        alt_text.check_embedding()
    file = inference.model_file(model)
    second = inference.model_file(outputs.beside) if outputs.beside else None
    if second and (not outputs.html or second == file):
        raise InputError("--beside takes a second model, for the page of --html FILE: name both")
    job = _Job(photos, file, options, outputs)
    place = _journal_path(photos, outputs)
    with Journal(place) if place else nullcontext() as journal:
        job.journal = journal
        try:
            job.describe()
        except KeyboardInterrupt:
            log.warning("stopped" + ("; the same command goes on from here" if journal else ""))
            raise
        finally:
            if journal and outputs.csv:
                lines = ((journal.located(one["photo"]), one["captions"]) for one in journal)
                sidecar.save_table(lines, outputs.csv)
    if outputs.html and job.shown:
        _save_page(job.shown, model, outputs.beside, options, outputs.html)
    if any(path.is_dir() for path in photos):
        log.info(job.summary)
    for what, place in (
        *(("overlays", outputs.overlay), ("maps", outputs.maps), ("texts", outputs.txt)),
        *(("animations", outputs.animation), ("page", outputs.html if job.shown else None)),
        *(("captions", outputs.jsonl), ("table", outputs.csv)),
    ):
        if place:
            log.info(f"{what} → {place}")
    failed, captioned = job.summary.failed.total(), job.summary.described + job.summary.earlier
    if failed:
        raise InputError(
            f"{failed} of {failed + captioned} photos could not be captioned (named above)"
        )
    return job.summary


@dataclass(frozen=True)
class _Photo:
    """A photo to be captioned.

    Attributes:
        path: its file.
        size, modified: of the file, before it is read, as in the journal; -1 if it is not there.
        files: what is to be made of it, by the journal's kinds.
    """

    path: Path
    size: int
    modified: int
    files: dict[str, Path]


class _Job:
    """One call of the command.

    Args:
        photos: what the user named.
        model: the model's file.
        options: how words are chosen.
        outputs: what is written.

    Attributes:
        summary: what became of the files so far.
        journal: open, while photos are described; `None` if nothing is remembered.
        shown: the best captions of the photos so far, if there is to be a page of them.
    """

    def __init__(
        self,
        photos: Sequence[Path],
        model: Path,
        options: SearchConfig,
        outputs: OutputConfig,
    ) -> None:
        self.summary = Summary()
        self.journal: Journal | None = None
        self.shown: list[Caption] = []
        self._model, self._options, self._outputs = model, options, outputs
        self._settings = _digest(model, options)
        self._named = {path for path in photos if not path.is_dir()}
        pictures = {"--overlay": outputs.overlay, "--animation": outputs.animation}
        own = [_inner_folder(option, folder, photos) for option, folder in pictures.items()]
        self._own_folders = [folder for folder in own if folder]
        self._found = [
            (path, relative)
            for path, relative in find_photos(photos, self._skip)
            if path in self._named or not self._is_own(path)
        ]
        # Made with other options it is another thing: hence the names.
        of_what = "" if outputs.show == "alpha" else f", {outputs.show}"
        moving = outputs.animation_format
        kinds = {
            f"overlay{of_what}": (outputs.overlay, ".png"),
            f"{moving}{of_what}": (outputs.animation, f".{moving}"),
            "maps": (outputs.maps, ".npz"),
            "txt": (outputs.txt, ".txt"),
        }
        self._paths = {
            kind: sidecar.output_paths([relative for _, relative in self._found], folder, suffix)
            for kind, (folder, suffix) in kinds.items()
            if folder
        }
        for kind, paths in self._paths.items():
            if kind not in ("maps", "txt"):
                self._check_pictures(paths)
        self._alt_kind = f"alt text, {outputs.alt_text}, {outputs.language}" + (
            ", overwriting" if outputs.overwrite_descriptions else ""
        )

    def describe(self) -> None:
        """Captions the photos that are missing, and makes of them what was asked for."""
        missing = [number for number in range(len(self._found)) if not self._is_done(number)]
        if not missing:
            return
        outputs = self._outputs
        with working("Loading the model"):
            writer = Writer(inference.load(self._model))
        wants_maps = outputs.overlay or outputs.animation or outputs.maps
        if wants_maps and not writer.model.has_attention:
            raise InputError(
                f"{self._model}: this model has no attention: there are no maps to write; leave "
                "--overlay, --animation and --maps out"
            )
        photos, ahead = itertools.tee(self._photo(number) for number in missing)
        wants_extras = outputs.maps or outputs.html or outputs.show == "evidence"
        extras = {self._found[number][0] for number in missing} if wants_extras else set()
        paths = (photo.path for photo in ahead)
        results = describe_files(writer, paths, self._options, extras=extras)
        with bar("Captioning", len(missing), "photos") as running:
            for photo, (_, captions) in zip(photos, results, strict=True):
                self._finish(photo, captions)
                running.advance()

    def _finish(self, photo: _Photo, captions: list[Caption] | InputError) -> None:
        """All that is left to do for a photo that went through the model."""
        try:
            if isinstance(captions, InputError):
                raise captions
            self._print(photo.path, captions)
            made = self._make(photo, captions)
        except InputError as error:
            self._fail(photo.path, error)
            return
        if self.journal:
            self.journal.add(photo.path, sidecar.as_json(captions), made)
        self.summary.described += 1
        if self._outputs.html:
            self.shown.append(captions[0])

    def _print(self, path: Path, captions: Sequence[Caption]) -> None:
        for one in captions:
            prefix = f"{path}: " if len(self._found) > 1 else ""
            score = f"  ({one.score:.3f})" if len(captions) > 1 else ""
            print(f"{prefix}{one.text}{score}", flush=True)

    def _make(self, photo: _Photo, captions: Sequence[Caption]) -> Made:
        """Writes the photo's files; returns its entry for the journal."""
        best, files = captions[0], dict(photo.files)
        size, modified = photo.size, photo.modified
        for kind, path in photo.files.items():
            if kind == "maps":
                sidecar.save_maps(best, path)
            elif kind == "txt":
                self._write_text(photo, path, captions)
            elif kind.startswith("overlay"):
                overlay.save(best, path, show=self._outputs.show)
            else:
                animation.save(best, path, show=self._outputs.show)
        if self._outputs.alt_text:
            files[self._alt_kind] = self._describe_in_metadata(photo.path, best.text)
            if self._outputs.alt_text == "embed":
                size, modified = _state(photo.path)
        if self.journal is None:
            return Made(size, modified, self._settings, {})
        names = {kind: self.journal.relative(path) for kind, path in files.items()}
        before = self.journal.made(photo.path)
        if before and before[:3] == (photo.size, photo.modified, self._settings):
            names = {**before.files, **names}  # what earlier calls made is still right
        return Made(size, modified, self._settings, names)

    def _write_text(self, photo: _Photo, path: Path, captions: Sequence[Caption]) -> None:
        """Writes the captions, one a line, but not over a text of somebody else's."""
        text = "".join(f"{one.text}\n" for one in captions)
        before = self.journal.made(photo.path) if self.journal else None
        if (
            not (before and "txt" in before.files)
            and path.exists()
            and path.read_bytes() != text.encode()  # as after a kill: written, but not noted
            and not (self.journal and self.journal.has_made(path))
        ):
            raise InputError(
                f"{path}: is there already, and not of this job; move it away or give another --txt"
            )
        write_text(path, text)

    def _describe_in_metadata(self, photo: Path, text: str) -> Path:
        """Writes alt text; returns the file in which the photo's description now is."""
        outputs = self._outputs
        write = alt_text.embed if outputs.alt_text == "embed" else alt_text.write_sidecar
        if not write(photo, text, outputs.language, overwrite=outputs.overwrite_descriptions):
            self.summary.kept += 1
        beside = alt_text.sidecar_of(photo)
        return beside if outputs.alt_text == "xmp" and beside.exists() else photo

    def _photo(self, number: int) -> _Photo:
        path = self._found[number][0]
        return _Photo(
            path, *_state(path), {kind: paths[number] for kind, paths in self._paths.items()}
        )

    def _is_done(self, number: int) -> bool:
        """Whether all that is asked for is there already."""
        photo = self._photo(number)
        if self.journal is None or photo.path in self._named or self._outputs.html:
            return False
        made = self.journal.made(photo.path)
        if made is None or made[:3] != (photo.size, photo.modified, self._settings):
            return False
        wanted = {kind: self.journal.relative(path) for kind, path in photo.files.items()}
        if self._outputs.alt_text:
            wanted[self._alt_kind] = made.files.get(self._alt_kind, "")
        for kind, name in wanted.items():
            if made.files.get(kind) != name or not self.journal.located(name).exists():
                return False
        log.debug(f"{photo.path}: done before")
        self.summary.earlier += 1
        return True

    def _skip(self, path: Path, what: str | InputError) -> None:
        if isinstance(what, InputError):
            self._fail(path, what)
        elif not self._is_own(path):
            log.debug(f"{path}: skipped ({what})")
            self.summary.skipped[what] += 1

    def _fail(self, path: Path, error: InputError) -> None:
        log.warning(error)
        # From "dir/a (1).jpg: is damaged (of 10 bytes 3); replace it" what is alike for all.
        reason = str(error).removeprefix(str(path)).partition(": ")[2]
        self.summary.failed[reason.partition(";")[0].partition(" (")[0]] += 1

    def _is_own(self, path: Path) -> bool:
        """Whether a file is one of those that are made here, which are pictures but no photos."""
        parents = Path(os.path.realpath(path)).parents  # of a link to itself, too
        return any(folder in parents for folder in self._own_folders)

    def _check_pictures(self, paths: Sequence[Path]) -> None:
        photos = {path.resolve() for path in self._named}
        for path in paths:
            if path.resolve() in photos:
                raise InputError(f"{path}: a picture would replace this photo; give a new folder")


def _inner_folder(option: str, pictures: Path | None, photos: Sequence[Path]) -> Path | None:
    """The folder of pictures that are made, if it lies in a folder that is searched.

    Raises:
        InputError: it is such a folder itself.
    """
    if pictures is None:
        return None
    folder = pictures.resolve()
    searched = [path.resolve() for path in photos if path.is_dir()]
    if folder in searched:
        raise InputError(f"{option} {pictures}: pictures need a folder other than the photos'")
    return folder if any(path in folder.parents for path in searched) else None


def _save_page(
    captions: Sequence[Caption],
    model: Path | None,
    beside: Path | None,
    options: SearchConfig,
    page: Path,
) -> None:
    """Writes the page of captioned photos, with those of another model `beside`."""
    by_model = {_name(model): captions}
    if beside:
        writer = Writer(inference.load(beside))
        photos = [one.photo for one in captions if one.photo]
        again: list[Caption] = []
        results = describe_files(writer, photos, options, extras=set(photos))
        for _, found in track(results, "Captioning", len(photos), "photos"):
            if isinstance(found, InputError):
                raise found
            again.append(found[0])
        by_model[_name(beside)] = again
    viewer.save_page(by_model, page, title=f"captioner: {' and '.join(by_model)}")


def _name(model: Path | None) -> str:
    """What a page calls a model."""
    return str(model or inference.PHOTO)


def _journal_path(photos: Sequence[Path], outputs: OutputConfig) -> Path | None:
    """Where it is remembered what is done; `None` if nothing has to be."""
    if outputs.jsonl:
        return outputs.jsonl
    if outputs.csv:
        return outputs.csv.with_name(f".{outputs.csv.name}.jsonl")
    folders = [path for path in photos if path.is_dir()]
    if outputs.txt:
        return outputs.txt / JOURNAL
    if not folders:
        return None
    results = outputs.overlay or outputs.animation or outputs.maps
    if outputs.alt_text:
        results = results or folders[0]
    return results / JOURNAL if results else None


def _state(path: Path) -> tuple[int, int]:
    """Size and time of change, as in the journal."""
    try:
        status = path.stat()
    except OSError:  # reading it will tell why
        return -1, -1
    return status.st_size, status.st_mtime_ns


def _digest(model: Path, options: SearchConfig) -> str:
    """Of all that decides which words are chosen; of no model too, whose absence loading tells."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(options)).encode())
    if model.is_file():
        with model.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
