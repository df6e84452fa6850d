"""Captions as alt text, in the metadata where photo managers and screen readers look for it.

A photo has two texts: its description (`dc:description`) and its alternative text for those who
cannot see it (IPTC's `AltTextAccessibility`). Each is written where it is still empty, so nothing
that somebody wrote is lost, in the language of the captions and as the default for all others.

They are written either into an XMP file beside the photo or into the photo itself. The file is
called `photo.jpg.xmp`, as by darktable and digiKam, and Immich finds it there: `photo.xmp` would be
that of `photo.png` too, and Adobe's programs, which call it so, have it for raw files only; of
others they read what is in the photo itself.
"""

import contextlib
import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lxml import etree
from PIL import ExifTags, Image, IptcImagePlugin

from captioner.errors import InputError
from captioner.files import replacing

__all__ = ["check_embedding", "check_language", "embed", "sidecar_of", "write_sidecar"]

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
LANG = "{http://www.w3.org/XML/1998/namespace}lang"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
ALT_TEXT = "{http://iptc.org/std/Iptc4xmpCore/1.0/xmlns/}AltTextAccessibility"
PREFIXES = {DESCRIPTION: "dc", ALT_TEXT: "Iptc4xmpCore"}
EVERYBODY = "x-default"  # XMP's name for the text of whoever reads none of the other languages

# Older metadata than XMP that programs show as the description.
EXIV2_DESCRIPTIONS = ("Exif.Image.ImageDescription", "Iptc.Application2.Caption")
EXIV2_NAMES = {DESCRIPTION: "Xmp.dc.description", ALT_TEXT: "Xmp.iptc.AltTextAccessibility"}
EXIV2_SILENT = 4

# What follows `begin=` is a byte-order mark.
PACKET_START = '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>\n'
PACKET_END = '\n<?xpacket end="w"?>\n'
EMPTY = f"""<x:xmpmeta xmlns:x="adobe:ns:meta/">
 <rdf:RDF xmlns:rdf="{RDF}">
  <rdf:Description rdf:about=""/>
 </rdf:RDF>
</x:xmpmeta>"""


def check_language(language: str) -> None:
    """Refuses with `InputError` what is no language tag (RFC 5646)."""
    if not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*", language):
        raise InputError(f'--language {language!r}: give a tag such as "en", "de" or "pt-BR"')


def check_embedding() -> None:
    """Refuses with `InputError` where nothing can be embedded."""
    if importlib.util.find_spec("pyexiv2") is None:
        raise InputError(
            'writing into photos needs pyexiv2: pip install "pyexiv2>=2.15", or use --alt-text xmp'
        )


# --- Beside the photo ----------------------------------------------------------------------------


def sidecar_of(photo: Path) -> Path:
    """The XMP file beside a photo."""
    return photo.with_name(f"{photo.name}.xmp")


def write_sidecar(photo: Path, text: str, language: str, *, overwrite: bool = False) -> bool:
    """Describes a photo in the XMP file beside it, whose other content stays.

    Args:
        photo: its file.
        text: the caption.
        language: its RFC 5646 tag.
        overwrite: also where a description is, in that file or in the photo.

    Returns:
        Whether there was anything to write.

    Raises:
        InputError: the XMP file cannot be read or written, or is none.
    """
    path = sidecar_of(photo)
    tree = _parse(path)
    root = tree.getroot()
    theirs = set() if overwrite else {*_described(root), *_described_in(photo)}
    ours = [name for name in EXIV2_NAMES if name not in theirs]
    if not ours:
        return False
    for name in ours:
        _describe(root, name, text, language)
    content = etree.tostring(tree, encoding="unicode")
    if not root.xpath("preceding-sibling::processing-instruction('xpacket')"):
        content = PACKET_START + content + PACKET_END
    with replacing(path) as partial:
        partial.write_text(content, encoding="utf-8")
    return True


def _parse(path: Path) -> Any:
    """The XMP file's document; an empty one where there is no file."""
    try:
        content = path.read_bytes() if path.exists() else EMPTY.encode()
        root = etree.fromstring(content, _parser())
    except (OSError, etree.XMLSyntaxError) as error:
        raise InputError(
            f"{path}: cannot be read as XMP ({' '.join(str(error).split())}); mend or remove it"
        ) from error
    if not list(_properties(root)):
        raise InputError(f"{path}: is no XMP (it has no rdf:Description); mend or remove it")
    return root.getroottree()


def _parser() -> Any:
    return etree.XMLParser(resolve_entities=False, no_network=True)


def _properties(root: Any) -> Iterator[Any]:
    """The elements that hold the photo's own properties."""
    for rdf in root.iter(f"{{{RDF}}}RDF"):
        yield from rdf.iterchildren(f"{{{RDF}}}Description")


def _described(root: Any) -> set[str]:
    """Those of the two texts that are there."""
    return {
        name
        for holder in _properties(root)
        for name in EXIV2_NAMES
        if holder.get(name, "").strip()
        or any("".join(found.itertext()).strip() for found in holder.iterchildren(name))
    }


def _described_in(photo: Path) -> set[str]:
    """Those of the two texts that the photo itself has."""
    described: set[str] = set()
    with contextlib.suppress(Exception), Image.open(photo) as image:  # broken metadata is none
        older = (IptcImagePlugin.getiptcinfo(image) or {}).get((2, 120), b"")
        if str(image.getexif().get(ExifTags.Base.ImageDescription, "")).strip() or older:
            described.add(DESCRIPTION)
        packet = image.info.get("xmp")
        if packet:
            described |= _described(etree.fromstring(packet.strip(b"\0"), _parser()))
    return described


def _describe(root: Any, name: str, text: str, language: str) -> None:
    """Sets one text for everybody and for its language; those in other languages stay."""
    holders = list(_properties(root))
    for holder in holders:  # written short, which only a text without language can be
        holder.attrib.pop(name, None)
    there = [found for holder in holders for found in holder.iterchildren(name)]
    if there:
        element = there[0]
    else:
        namespaces = {PREFIXES[name]: etree.QName(name).namespace}
        element = etree.SubElement(holders[0], name, nsmap=namespaces)
    choices = element.find(f"{{{RDF}}}Alt")
    if choices is None:
        element.text = None
        choices = etree.SubElement(element, f"{{{RDF}}}Alt")
    for place, wanted in enumerate((EVERYBODY, language)):
        items = [one for one in choices if one.get(LANG, "").lower() == wanted.lower()]
        item = items[0] if items else etree.Element(f"{{{RDF}}}li", {LANG: wanted})
        item.text = text
        if not items:
            choices.insert(place, item)


# --- Into the photo ------------------------------------------------------------------------------


def embed(photo: Path, text: str, language: str, *, overwrite: bool = False) -> bool:
    """Describes a photo in its own metadata; the rest of the file stays as it is.

    With `overwrite`, descriptions in EXIF and IPTC, which would contradict it, are removed.

    Args:
        photo: its file; of a link, what it leads to.
        text: the caption.
        language: its RFC 5646 tag.
        overwrite: also where a description is.

    Returns:
        Whether there was anything to write.

    Raises:
        InputError: the file's format holds no XMP that can be written, its metadata is broken, or
            it cannot be written.
    """
    import pyexiv2

    pyexiv2.set_log_level(EXIV2_SILENT)
    photo = photo.resolve()
    try:
        # Read here, for exiv2 knows no names that are not Unicode.
        with pyexiv2.ImageData(photo.read_bytes()) as image:
            xmp, older = image.read_xmp(), {**image.read_exif(), **image.read_iptc()}
            outdated = [name for name in EXIV2_DESCRIPTIONS if _has_text(older.get(name))]
            theirs = {name for name, exiv2 in EXIV2_NAMES.items() if _has_text(xmp.get(exiv2))}
            theirs |= {DESCRIPTION} if outdated else set()
            ours = [name for name in EXIV2_NAMES if overwrite or name not in theirs]
            if not ours:
                return False
            for name in ours:
                there = xmp.get(EXIV2_NAMES[name])
                languages = dict(there) if isinstance(there, Mapping) else {}
                new = {f'lang="{one}"': text for one in (EVERYBODY, language)}
                image.modify_xmp({EXIV2_NAMES[name]: {**new, **languages, **new}})
            if overwrite:
                image.modify_exif({name: None for name in outdated if name.startswith("Exif")})
                image.modify_iptc({name: None for name in outdated if name.startswith("Iptc")})
            content = image.get_bytes()
    except OSError as error:
        raise InputError(f"{photo}: cannot be read ({error.strerror or error})") from error
    except (RuntimeError, UnicodeError) as error:  # all that exiv2 complains of
        raise InputError(
            f"{photo}: nothing can be written into it ({' '.join(str(error).split())}); use "
            "--alt-text xmp"
        ) from error
    with replacing(photo) as partial:
        partial.write_bytes(content)
        shutil.copymode(photo, partial)
    return True


def _has_text(value: Any) -> bool:
    """Whether a value that exiv2 read says anything: text, a list of texts, or one per language."""
    texts = value.values() if isinstance(value, Mapping) else value
    return bool(texts) and any(str(one).strip() for one in texts)
