"""Images and sound as data sets give them."""

import io
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import LoadError, as_error


def read_image(value: Any, directory: Path) -> Any:
    """Returns an RGB image of PIL: of a path, of bytes, or of what `datasets` gives."""
    from PIL import Image  # optional

    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value["path"]
    if isinstance(value, bytes):
        value = io.BytesIO(value)
    elif isinstance(value, str):
        value = directory / value
    elif value is None:
        raise LoadError("an image part names no file", fix='it looks like {"type": "image", "path": "1.png"}')
    with as_error(LoadError, f"cannot read the image {value}", OSError, ValueError):
        return (value if hasattr(value, "convert") else Image.open(value)).convert("RGB")


def read_sound(value: Any, directory: Path, *, rate: int) -> Any:
    """Returns sound as float32 [samples] from -1 to 1: of a .wav file, of samples, or of what `datasets` gives.

    Raises:
        LoadError: the file cannot be read, or has another rate.
    """
    if isinstance(value, Mapping) and value.get("array") is not None:
        found, own = np.asarray(value["array"], np.float32), int(value["sampling_rate"])
    elif not isinstance(value, str | Mapping):
        return np.asarray(value, np.float32)
    else:
        path = directory / str(value["path"] if isinstance(value, Mapping) else value)
        what, fix = f"cannot read the sound {path}", "convert it to .wav with 16 bits, or give samples"
        with as_error(LoadError, what, OSError, EOFError, wave.Error, fix=fix), wave.open(str(path), "rb") as file:
            own, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            raw = file.readframes(file.getnframes())
        if width != 2:
            raise LoadError(f"{path} has {8 * width} bits a sample", fix="convert it to 16 bits")
        found = np.frombuffer(raw, "<i2").astype(np.float32).reshape(-1, channels).mean(1) / 2**15
    if not len(found):
        raise LoadError("there is no sound: it has no samples")
    if own != rate:
        raise LoadError(f"sound with {own:,} samples a second", why=f"the model hears {rate:,}", fix="resample it")
    return found
