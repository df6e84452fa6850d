"""Alt text where photo managers look for it, and nothing lost of what was there."""

import io
import os
from pathlib import Path

import numpy as np
import pyexiv2
import pytest
from PIL import Image

import captioner.images  # noqa: F401  # so that Pillow reads HEIC
from captioner.alt_text import check_embedding, check_language, embed, sidecar_of, write_sidecar
from captioner.errors import InputError

TEXT = "a dog & a <cat>"
NAMES = ("Xmp.dc.description", "Xmp.iptc.AltTextAccessibility")
BOTH = {'lang="x-default"': TEXT, 'lang="en"': TEXT}
FORMATS = {".jpg": "JPEG", ".png": "PNG", ".webp": "WEBP", ".tif": "TIFF", ".jp2": "JPEG2000"}

# As Lightroom writes it: other properties as attributes, one with a line break; a history.
ADOBE = """<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="Adobe XMP Core">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <rdf:Description rdf:about="" xmlns:xmp="http://ns.adobe.com/xap/1.0/"
    xmlns:photoshop="http://ns.adobe.com/photoshop/1.0/"
    xmlns:dc="http://purl.org/dc/elements/1.1/"
    xmp:Rating="4" photoshop:Instructions="one&#xA;two">
   <!-- by hand -->
   <dc:description><rdf:Alt>{items}</rdf:Alt></dc:description>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>"""
GERMAN = '<rdf:li xml:lang="x-default">Rex</rdf:li><rdf:li xml:lang="de">Rex</rdf:li>'


def photo(folder: Path, name: str = "a.jpg", **options: object) -> Path:
    pixels = np.random.default_rng(3).integers(0, 255, (30, 40, 3), np.uint8)
    path = folder / name
    Image.fromarray(pixels).save(path, FORMATS.get(path.suffix), **options)
    return path


def read(path: Path) -> dict[str, object]:
    """By exiv2, as darktable and digiKam read."""
    with pyexiv2.ImageData(path.read_bytes()) as image:
        return image.read_xmp()


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_a_new_sidecar_is_read_by_exiv2(tmp_path: Path) -> None:
    path = photo(tmp_path)
    before = path.read_bytes()
    assert write_sidecar(path, TEXT, "en")
    assert sidecar_of(path) == tmp_path / "a.jpg.xmp"
    assert read(sidecar_of(path)) == dict.fromkeys(NAMES, BOTH)
    assert path.read_bytes() == before


def test_what_a_sidecar_held_stays(tmp_path: Path) -> None:
    path = photo(tmp_path)
    sidecar_of(path).write_text(ADOBE.format(items=""), "utf-8")
    assert write_sidecar(path, TEXT, "en")
    found = read(sidecar_of(path))
    assert found["Xmp.xmp.Rating"] == "4"
    assert found["Xmp.photoshop.Instructions"] == "one\ntwo"
    assert [found[name] for name in NAMES] == [BOTH, BOTH]
    text = sidecar_of(path).read_text("utf-8")
    assert "<!-- by hand -->" in text
    assert text.count("<?xpacket begin") == text.count("<?xpacket end") == 1


def test_a_description_is_kept_and_the_alt_text_is_added(tmp_path: Path) -> None:
    path = photo(tmp_path)
    sidecar_of(path).write_text(ADOBE.format(items=GERMAN), "utf-8")
    assert write_sidecar(path, TEXT, "en")
    found = read(sidecar_of(path))
    assert found[NAMES[0]] == {'lang="x-default"': "Rex", 'lang="de"': "Rex"}
    assert found[NAMES[1]] == BOTH
    content = sidecar_of(path).read_bytes()
    assert not write_sidecar(path, "another", "en")
    assert sidecar_of(path).read_bytes() == content


def test_overwriting_leaves_other_languages(tmp_path: Path) -> None:
    path = photo(tmp_path)
    sidecar_of(path).write_text(ADOBE.format(items=GERMAN), "utf-8")
    assert write_sidecar(path, TEXT, "pt-BR", overwrite=True)
    assert read(sidecar_of(path))[NAMES[0]] == {
        'lang="x-default"': TEXT,
        'lang="de"': "Rex",
        'lang="pt-BR"': TEXT,
    }
    assert write_sidecar(path, "new", "PT-br", overwrite=True)
    assert read(sidecar_of(path))[NAMES[0]] == {
        'lang="x-default"': "new",
        'lang="de"': "Rex",
        'lang="pt-BR"': "new",
    }


@pytest.mark.parametrize("where", ["xmp", "exif", "iptc"])
def test_a_description_in_the_photo_counts_for_its_sidecar(tmp_path: Path, where: str) -> None:
    path = photo(tmp_path)
    with pyexiv2.ImageData(path.read_bytes()) as image:
        if where == "xmp":
            image.modify_xmp({NAMES[0]: "Rex"})
        elif where == "exif":
            image.modify_exif({"Exif.Image.ImageDescription": "Rex"})
        else:
            image.modify_iptc({"Iptc.Application2.Caption": "Rex"})
        path.write_bytes(image.get_bytes())
    assert write_sidecar(path, TEXT, "en")
    assert read(sidecar_of(path)) == {NAMES[1]: BOTH}
    assert write_sidecar(path, TEXT, "en", overwrite=True)
    assert read(sidecar_of(path)) == dict.fromkeys(NAMES, BOTH)


@pytest.mark.parametrize(
    ("content", "message"),
    [("<x:xmpmeta>", "cannot be read as XMP"), ("<a/>", "is no XMP"), ("", "cannot be read")],
)
def test_a_sidecar_that_is_none_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = photo(tmp_path)
    sidecar_of(path).write_text(content)
    with pytest.raises(InputError, match=rf"a\.jpg\.xmp: {message}.*mend or remove it"):
        write_sidecar(path, TEXT, "en", overwrite=True)
    assert sidecar_of(path).read_text() == content


@pytest.mark.parametrize("suffix", FORMATS)
def test_embedding_leaves_every_pixel(tmp_path: Path, suffix: str) -> None:
    path = photo(tmp_path, f"caf\xe9{suffix}")
    before = pixels(path)
    path.chmod(0o640)
    assert embed(path, TEXT, "en")
    assert read(path) == dict.fromkeys(NAMES, BOTH)
    assert pixels(path) == before
    assert path.stat().st_mode & 0o777 == 0o640
    assert not embed(path, "another", "en")
    assert read(path) == dict.fromkeys(NAMES, BOTH)
    assert list(tmp_path.iterdir()) == [path]


def test_embedding_leaves_all_frames_and_the_compressed_data(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]
    for name in ("a.png", "b.webp", "c.tif", "d.mpo"):
        path = tmp_path / name
        frames[0].save(path, save_all=True, append_images=frames[1:])
        with Image.open(path) as image:
            before = [image.seek(n) or image.convert("RGB").tobytes() for n in range(3)]
        assert embed(path, TEXT, "en")
        with Image.open(path) as image:
            after = [image.seek(n) or image.convert("RGB").tobytes() for n in range(3)]
        assert after == before
    path = photo(tmp_path)
    scan = path.read_bytes()[path.read_bytes().index(b"\xff\xda") :]
    assert embed(path, TEXT, "en")
    assert path.read_bytes().endswith(scan)


def test_embedding_keeps_and_overwrites_as_told(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[270], exif[271] = "Rex", "Leica"
    path = photo(tmp_path, exif=exif)
    with pyexiv2.ImageData(path.read_bytes()) as image:
        image.modify_iptc({"Iptc.Application2.Caption": "Rex"})
        path.write_bytes(image.get_bytes())
    assert embed(path, TEXT, "en")
    assert read(path) == {NAMES[1]: BOTH}
    assert embed(path, TEXT, "en", overwrite=True)
    assert read(path) == dict.fromkeys(NAMES, BOTH)
    with pyexiv2.ImageData(path.read_bytes()) as image:
        assert image.read_exif() == {"Exif.Image.Make": "Leica"}
        assert image.read_iptc() == {}


def test_embedding_follows_links_and_takes_any_name(tmp_path: Path) -> None:
    path = photo(tmp_path, os.fsdecode(b"caf\xe9.jpg"))
    link = tmp_path / "link.jpg"
    link.symlink_to(path.name)
    assert embed(link, TEXT, "en")
    assert link.is_symlink()
    assert read(path) == dict.fromkeys(NAMES, BOTH)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "HEIF", "PPM"])
def test_what_cannot_be_embedded_is_said(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jpg"
    stream = io.BytesIO()
    Image.new("RGB", (40, 30)).save(stream, kind)
    path.write_bytes(stream.getvalue())
    with pytest.raises(
        InputError, match=r"a\.jpg: nothing can be written into it .*--alt-text xmp"
    ):
        embed(path, TEXT, "en")
    assert path.read_bytes() == stream.getvalue()
    assert write_sidecar(path, TEXT, "en")


def test_a_sidecar_of_a_heic_photo_heeds_its_description(tmp_path: Path) -> None:
    path = tmp_path / "a.heic"
    beside = photo(tmp_path)
    write_sidecar(beside, TEXT, "en")
    Image.new("RGB", (40, 30)).save(path, "HEIF", xmp=sidecar_of(beside).read_bytes())
    assert not write_sidecar(path, TEXT, "en")


def test_without_pyexiv2(monkeypatch: pytest.MonkeyPatch) -> None:
    check_embedding()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "pyexiv2>=2\.15"'):
        check_embedding()


@pytest.mark.parametrize("language", ["", "e", "en_US", "english language", "en-"])
def test_what_is_no_language(language: str) -> None:
    check_language("zh-Hans-CN")
    with pytest.raises(InputError, match="--language"):
        check_language(language)
