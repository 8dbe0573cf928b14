"""Every error mezzo raises. A message says what was asked, what came, why not, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from types import UnionType
from typing import Any


class MezzoError(Exception):
    """Base of every error mezzo raises on purpose."""


class FormatError(MezzoError, ValueError):
    """A device, dtype or number format that does not exist, or a format that the device lacks."""


class PolicyError(MezzoError, ValueError):
    """A policy that cannot be parsed, contradicts itself, or does not fit the model."""


class CastError(MezzoError, RuntimeError):
    """An op inside a region met dtypes it cannot work with; names op, module, arguments and the rule that fixes it."""


class ForbiddenOpError(CastError):
    """An op that the policy forbids; names the stable replacement."""


class RegionError(MezzoError, RuntimeError):
    """Regions entered or left in an order that cannot be honoured."""


class RegionTypeError(RegionError, TypeError, ValueError):
    """A region given something it cannot take; torch raises TypeError or ValueError there."""


class ScalerError(MezzoError, RuntimeError, ValueError, AssertionError):
    """A loss scaler used in an order that would corrupt gradients or weights.

    torch's scaler raises one of the three built-in errors in its place, so code that catches any of them goes on working.
    """


class ScalerArgumentError(PolicyError, AssertionError):
    """A loss scaler made with a number outside its range; an AssertionError in torch."""


class StepError(MezzoError, RuntimeError):
    """A prepared step used in the wrong order; names the right call."""


class StepTypeError(StepError, TypeError):
    """A prepared step called with arguments it does not have, or unpacked; Python raises TypeError there."""


class StepAttributeError(StepError, AttributeError):
    """A stepper asked for what it does not have; names what to write."""


class StoppedRun(MezzoError, RuntimeError):
    """A run that cannot go on; base of the errors that `step()` raises about inf, NaN and underflow.

    Args:
        what: what happened.
        advice: what to do about it.
        is_batch_to_blame: running the last batch again may show the cause.

    Attributes:
        report: the `mezzo.diagnose.TraceReport` of the last batch, run again op by op; None where it could not be.
    """

    report: Any = None

    def __init__(self, what: str, advice: str = "", *, is_batch_to_blame: bool = True) -> None:
        super().__init__(what, advice)
        self.what, self.advice, self.is_batch_to_blame = what, advice, is_batch_to_blame

    def __str__(self) -> str:
        return f"{self.what}. {self.advice}" if self.advice else self.what


class LossScaleExhausted(StoppedRun):
    """The loss scale reached its floor, or too many steps in a row were skipped."""


class NonFiniteStep(StoppedRun):
    """A step met inf or NaN that no loss scale can fix; names parameters, buffers and counts."""


class GradientUnderflow(StoppedRun):
    """Too many steps in a row had no gradient left: 16 bit flushed every one to zero."""


class MasterError(MezzoError, ValueError):
    """16-bit trainable weights without a way to keep their small updates."""


class OperandError(MezzoError, RuntimeError):
    """A gradient, moment or master that does not fit its parameter; names both."""


class CheckpointError(MezzoError, RuntimeError, ValueError):
    """A checkpoint that cannot be read, or does not fit what it is loaded into."""


class InvariantError(MezzoError, RuntimeError):
    """An invariant of the training step was found broken."""


class DataError(MezzoError, ValueError):
    """A data file that is missing, empty, or not what its options say."""


class ConfigError(MezzoError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""


class BenchError(MezzoError, RuntimeError):
    """A benchmark that cannot be trusted or run: a variant failed, its tests are red, or a result cannot be read."""


class DistributedError(MezzoError, RuntimeError):
    """Ranks that disagree, or a rank that did not answer in time; names the ranks."""


def listed(names: Sequence[str], count: int = 3) -> str:
    """Return the first few names of a list, and how many there are beyond them.

    >>> listed(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


def plural(noun: str, count: int) -> str:
    """Return a noun as it stands behind a number.

    >>> plural("step", 1), plural("step", 0)
    ('step', 'steps')
    """
    return noun if count == 1 else f"{noun}s"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, without its full stop; the name of its class where it says nothing, and what torch's writer hid."""
    if "inline_container" in str(error) and isinstance(error.__context__, OSError):  # a full disk
        return first_line(error.__context__)
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__


def interrupt_in(error: BaseException | None, handled: BaseException | None) -> BaseException | None:
    """Return what is to end the program, as Ctrl-C is, of which a library made an error; None where nothing is, or it was being `handled` before."""
    while error is not handled and isinstance(error, Exception):
        error = error.__context__
    return None if error is handled else error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of Python or torch, on any device, where memory ran out. torch has no class for it on the CPU."""
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or "DefaultCPUAllocator" in str(error)


def shown(value: object, longest: int = 60) -> str:
    """Return a value as an error quotes it: one line of so many characters at most, or its class where its `repr` raises, as that of a long number does."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:
        return type(value).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def kind_of(value: object) -> str:
    """Return what something is, in words for an error: the class of an object, with numpy's own named as such, or that it is a class itself."""
    kind = value if isinstance(value, type) else type(value)
    return f"{'the class ' * (kind is value)}{'numpy.' * (kind.__module__ == 'numpy')}{kind.__name__}"


def check_given(
    call: str,
    name: str,
    value: object,
    kind: type[Any] | UnionType,
    wanted: str,
    raising: type[MezzoError] = ConfigError,
) -> None:
    """Refuse, by an error of `raising`, what an argument of a call cannot be: what is not of a kind. Host only."""
    if not isinstance(value, kind):
        raise raising(f"{call} was given {kind_of(value)} for {name}; give {wanted}.")


def as_flag(call: str, name: str, value: object, raising: type[MezzoError] = ConfigError) -> bool:
    """Return whether a flag from outside is set; an error of `raising` for what is neither, as text, a function or several numbers. Syncs: for a tensor."""
    try:
        if isinstance(value, (str, bytes)) or callable(value):
            raise TypeError
        return bool(value)
    except Exception:
        raise raising(f"{call} was given {kind_of(value)} for {name}; give True or False.") from None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the closing clause of a message about an unknown word, which need not be text.

    Returns:
        " Did you mean 'x'?" for the nearest spelling, else the list of valid ones; of more than 30 their number.

    >>> did_you_mean("bf61", ["bf16", "fp16"])
    " Did you mean 'bf16'?"
    >>> did_you_mean("zzz", ["bf16", "fp16"])
    ' Valid: bf16, fp16.'
    """
    options = sorted(set(known))
    by_fold = {option.casefold(): option for option in options}
    text = word if isinstance(word, str) else shown(word)
    near = difflib.get_close_matches(text.casefold(), by_fold, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{by_fold[near[0]]}'?"
    too_many = f" None of the {len(options):,} valid ones is like it."
    return f" Valid: {', '.join(options)}." if len(options) <= 30 else too_many


def misfit_of(
    function: Callable[..., object], given: Mapping[str, Any], words: Mapping[str, str | Callable[[Any], str]]
) -> str:
    """Return what does not fit a function's arguments, and what to write: `words` says it of those that other libraries have.

    By an empty name it says what to add of calls with too many or too few.

    >>> misfit_of(lambda x: x, {"y": 1}, {"y": "write x"})
    "has no argument 'y': write x."
    """
    known = {name: one for name, one in signature(function).parameters.items() if name != "self"}
    if unknown := next((name for name in given if name not in known), ""):
        word = words.get(unknown)
        meant = word(given[unknown]) if callable(word) else word
        return f"has no argument '{unknown}'" + (f": {meant}." if meant else f".{did_you_mean(unknown, known)}")
    takes = [name if one.kind is one.POSITIONAL_OR_KEYWORD else f"{name}=..." for name, one in known.items()]
    return f"takes {', '.join(takes)}.{words.get('', '')}"
