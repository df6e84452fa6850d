"""Captions photos with an exported LiteRT model; needs numpy, pillow and ai-edge-litert only.

python -m captioner export --format litert --out model/
python examples/litert_caption.py model/ dog.jpg
"""

import json
import sys
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from PIL import Image, ImageOps


def square(photo: Image.Image, facts: dict) -> Image.Image:
    """The square that the model sees, made of a photo as in training."""
    size, bicubic = facts["image_size"], Image.Resampling.BICUBIC
    photo.draft(None, (2 * size, 2 * size))  # large JPEGs are decoded small: faster
    photo = ImageOps.exif_transpose(photo).convert("RGB")
    if facts["resize"] == "crop":
        return ImageOps.fit(photo, (size, size), bicubic)
    if facts["resize"] == "pad":
        width, height = photo.size
        side = max(width, height)
        whole = Image.new("RGB", (side, side), tuple(facts["pad_colour"]))
        whole.paste(photo, ((side - width) // 2, (side - height) // 2))
        photo = whole
    return photo.resize((size, size), bicubic)


folder, *photos = map(Path, sys.argv[1:])
facts = json.loads((folder / "captioner.json").read_text(encoding="utf-8"))
model = Interpreter(str(folder / "captioner.tflite"), num_threads=2).get_signature_runner()

for path in photos:
    outputs = model(photo=np.asarray(square(Image.open(path), facts))[None])
    tokens = outputs["tokens"][0]
    words = [facts["words"][token] for token in tokens[tokens > 0]]
    text, joined = "", True
    for word in words:  # no space before the 's of "man 's", none in Chinese
        joined = joined or word in facts["joined_to_the_word_before"]
        text += word if joined else f" {word}"
        joined = word in facts["joined_to_the_word_after"]
    print(f"{path}: {text}")
    for word, alpha in zip(words, outputs.get("attention", [[]])[0], strict=False):
        row, column = np.unravel_index(alpha.argmax(), alpha.shape)
        print(f"  {word:15} {100 * alpha.max():3.0f}% of alpha on row {row}, column {column}")
