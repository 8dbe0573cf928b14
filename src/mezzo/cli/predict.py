"""`mezzo predict`: classify lines with a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import BinaryIO

import tyro

from ..errors import ConfigError, DataError
from ..train import Prediction, Predictor, refuse_wide
from .main import drop_the_rest


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """Print each line's label, a tab and its probability; an empty line stays empty.

    Attributes:
        file: text file, one text a line, UTF-8; "-" reads standard input.
        model: folder of a training run or of a transformers classifier, or a hub name.
        json: print a JSON object a line, with the text.
        batch_size: lines classified together; 1 answers each line as it comes.
        max_length: tokens read of a line; 0 is what the model was trained with.
        policy: precision of the forward pass: "auto", "fp32", "bf16", ...
        device: "auto", "cpu", "cuda", ...
    """

    file: tyro.conf.Positional[str] = "-"
    model: str
    json: bool = False
    batch_size: int = 32
    max_length: int = 0
    policy: str = "auto"
    device: str = "auto"


@contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin is None:
            raise DataError("standard input is closed. Write the path of a file, or give the lines to standard input.")
        yield sys.stdin.buffer
        return
    try:
        stream = open(file, "rb")
    except OSError as error:
        raise DataError(f"the file {file} cannot be read: {error.strerror}. Write a path, or - for standard input.") from None  # fmt: skip
    with stream:
        yield stream


def _batches(stream: BinaryIO, file: str, size: int) -> Iterator[list[str]]:
    """Yield lines in batches; those before a line that cannot be read come before its error."""
    batch: list[str] = []
    name = "standard input" if file == "-" else file
    for number, raw in enumerate(stream, start=1):
        if number == 1:
            refuse_wide(raw, name)
        try:
            batch.append(raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
        except UnicodeDecodeError as error:
            yield batch
            raise DataError(f"line {number} of {name} is not UTF-8: byte 0x{raw[error.start]:02x}.") from None
        if len(batch) == size:
            yield batch
            batch = []
    yield batch


def _line(text: str, found: Prediction | None, as_json: bool) -> str:
    if as_json:
        answer = {"label": None, "probability": None} if found is None else asdict(found)
        return json.dumps({"text": text, **answer}, ensure_ascii=False)
    if found is None:
        return ""
    # a label keeps to its column
    label = found.label.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")
    return f"{label}\t{found.probability:.4f}"


def run(argv: Sequence[str]) -> int:
    """Run `mezzo predict` with the words after it. Returns: 0 done. Writes: standard output."""
    options = tyro.cli(PredictOptions, prog="mezzo predict", args=list(argv))
    if options.batch_size < 1:
        raise ConfigError(f"batch_size={options.batch_size} must be at least 1.")
    predict = Predictor(options.model, policy=options.policy, device=options.device, max_length=options.max_length)
    try:
        with _opened(options.file) as stream:
            for batch in _batches(stream, options.file, options.batch_size):
                for text, found in zip(batch, predict(batch), strict=True):
                    print(_line(text, found, options.json))
                sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` perhaps, has what it wanted
        drop_the_rest()
    return 0
