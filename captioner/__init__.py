"""Image captioning in Keras with attention, and a map of where it looked for every word.

import captioner
model = captioner.load()                                 # the shipped model, a run, a file
caption = captioner.describe(model, "dog.jpg", beam=5)   # a Caption; a list for a list
captioner.overlay.figure(caption).save("dog.png")
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"
__all__ = ["Caption", "Captioner", "InputError", "describe", "load", "overlay"]

# What TensorFlow's C++ part has to say ("could not find cuda drivers", even as an error) is no news
# to people who caption photos; whoever wants it sets the variable to 0.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_HOMES = {
    "Caption": "captioner.caption",
    "Captioner": "captioner.model",
    "InputError": "captioner.errors",
    "describe": "captioner.inference",
    "load": "captioner.inference",
}


def __getattr__(name: str) -> Any:
    """Loads what is asked for only then: `captioner.search` needs no TensorFlow, `load` does."""
    if name in _HOMES:
        if name in ("Captioner", "describe", "load"):
            importlib.import_module("captioner.messages").load_tensorflow()
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "overlay":
        return importlib.import_module("captioner.overlay")
    raise AttributeError(f"module 'captioner' has no attribute {name!r}")
