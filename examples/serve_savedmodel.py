"""Captions photos with an exported SavedModel, here or by TensorFlow Serving.

python -m captioner export --format savedmodel --out models/captioner/1
python examples/serve_savedmodel.py models/captioner/1 dog.jpg        (needs tensorflow only)

tensorflow_model_server --rest_api_port=8501 --model_name=captioner \\
    --model_base_path=$PWD/models/captioner
python examples/serve_savedmodel.py http://localhost:8501/v1/models/captioner dog.jpg
"""

import base64
import json
import sys
import urllib.request
from pathlib import Path


def ask(url: str, files: list[bytes]) -> dict:
    """The outputs, by name, as TensorFlow Serving gives them: one list entry per photo."""
    encoded = [{"b64": base64.b64encode(content).decode()} for content in files]
    question = {"signature_name": "caption", "inputs": {"image_bytes": encoded}}
    body = json.dumps(question).encode()
    with urllib.request.urlopen(f"{url}:predict", body) as answer:
        return json.load(answer)["outputs"]


def run(folder: str, files: list[bytes]) -> dict:
    """The same, computed here."""
    import tensorflow as tf

    caption = tf.saved_model.load(folder).signatures["caption"]
    outputs = {key: value.numpy() for key, value in caption(tf.constant(files)).items()}
    outputs["text"] = [text.decode() for text in outputs["text"]]
    outputs["words"] = [[word.decode() for word in row] for row in outputs["words"]]
    return outputs


model, *paths = sys.argv[1:]
outputs = (ask if model.startswith("http") else run)(model, [Path(p).read_bytes() for p in paths])
columns = (outputs[name] for name in ("text", "words", "probabilities"))
for path, text, words, chances in zip(paths, *columns, strict=True):
    print(f"{path}: {text}")
    pairs = zip(words, chances, strict=True)
    print("  " + ", ".join(f"{word} {chance:.2f}" for word, chance in pairs if word))
