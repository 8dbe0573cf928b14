"""What a trace writes down: plain frozen data, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "optimizer"]
EventKind = Literal["source", "mixed", "constant", "leaf"]
"""How non-finite values came about.

source: arithmetic on finite values. mixed: NaN made from infinities. constant: written on purpose by an op that was
given inf or NaN as a number. leaf: found in a tensor made before or outside the trace.
"""
SinkKind = Literal["loss", "gradient", "parameter", "buffer", "output", "activation", "read", "exit"]

OUTSIDE = "(outside any module)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """A line of source."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where and when an op ran.

    Attributes:
        phase: forward, backward or optimizer; a checkpoint's recompute is forward.
        root: class name of the outermost module, empty outside any module.
        module: fully qualified name below the root, empty for the root itself.
        classes: class names from the outermost module to the innermost.
        user: nearest line of the user's code.
        library: nearest line of an installed package, where that is nearer.
        called: public name of the torch function that was called, empty where torch called itself.
        op: plain name of the op; in backward, of the forward op whose gradient ran, or of what the program's own lines ran there.
        step: optimizer steps before this one, skipped ones counted.
        own_node: of what the program's own lines ran in backward, the Function whose backward they are, or the op they hook; else empty.
        is_ruled: whether a policy's rules reach it: it ran inside a module, or in a region.
    """

    phase: Phase
    root: str
    module: str
    classes: tuple[str, ...]
    user: Frame | None
    library: Frame | None
    called: str
    op: str
    step: int
    rank: int
    own_node: str = ""
    is_ruled: bool = True

    @property
    def is_own(self) -> bool:
        """Whether it ran in backward by the program's own lines: a hook, or the backward of a Function of its own."""
        return bool(self.own_node)

    @property
    def is_derivative(self) -> bool:
        """Whether it is the gradient of a forward op as autograd computes it."""
        return self.phase == "backward" and not self.is_own

    @property
    def frame(self) -> Frame | None:
        """The line to look at first."""
        return self.user or self.library

    @property
    def path(self) -> str:
        """Module path as a reader calls it: the name, else the root's class, else what stands outside."""
        return self.module or self.root or OUTSIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorFacts:
    """What a report says about a tensor.

    Attributes:
        name: the argument's name in the op's schema, or the name of a result.
        dtype: short name.
        device: as torch prints it.
        amax: largest finite magnitude.
        nan, posinf, neginf, zeros: counts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    device: str
    amax: float
    nan: int
    posinf: int
    neginf: int
    zeros: int

    @property
    def nonfinite(self) -> int:
        """Count of all non-finite values."""
        return self.nan + self.posinf + self.neginf

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """What the same op on the same inputs gives in fp32 or fp64; `amax` is the largest finite magnitude of its results."""

    dtype: str
    is_finite: bool
    amax: float
    has_nan: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    """16-bit results that are 0 although the same op in fp32 gives another number.

    Attributes:
        dtype: format that flushed.
        share: of the elements, in [0, 1].
        wide_amax: largest lost magnitude.
        constant: the number written in the code that rounds to 0, None if it was no constant.
        is_cancellation: no op flushed it: operands that 16 bit had rounded came out equal.
        made_by: where such operands were made.
        carried: products that the zeros went through, which would narrow the fp32 values again.
    """

    site: Site
    kernel: str
    dtype: str
    share: float
    wide_amax: float
    constant: float | None
    is_cancellation: bool = False
    made_by: tuple[Site, ...] = ()
    carried: tuple[Site, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Non-finite values came into being, or into sight.

    Attributes:
        index: its place among the events of the trace.
        kernel: the op that ran, as torch calls it.
        inputs: floating inputs, values before the op.
        outputs: floating results and written arguments.
        parents: events whose non-finite values were inputs.
        wide: recomputation in fp32, then fp64 while that is not finite.
        offending: (argument, value) at the first non-finite element of the result, where elements correspond.
        full_rows: rows of a softmax-like op whose every input is -inf.
        loss_scale: factor on the loss of the running backward; 1 outside.
        flush: the flush to zero an input came through.
        reference: the op on fp32 values carried from the inputs of the program; None where they are not known.
        tracked: an input leads to gradients.
        where: index of the first non-finite element of the result.
        replacement: an expression that was run in the op's place and is finite; empty where none is known.
        fused: a function that does this op and the one before it without the number in between; empty where there is none.
        is_local_enough: with the op that flushed in fp32, and no more, this one is finite.
        followers: where products read what overflowed before it is small again, or what a matrix without factors was made in: they need fp32 too.
        leaf: what the tensor is called, for leaves and casts; the number, for constants.
    """

    index: int
    kind: EventKind
    kernel: str
    site: Site
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    parents: frozenset[int]
    wide: tuple[Wide, ...]
    offending: tuple[tuple[str, float], ...]
    full_rows: int
    loss_scale: float
    flush: Flush | None
    leaf: str
    reference: Wide | None = None
    tracked: bool = True
    where: tuple[int, ...] = ()
    replacement: str = ""
    fused: str = ""
    is_local_enough: bool = False
    followers: tuple[Site, ...] = ()

    @property
    def dtype(self) -> str:
        """Short name of the format of the result that went wrong."""
        return self.outputs[0].dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Sink:
    """A tensor that matters and that a non-finite value reached.

    Attributes:
        kind: the loss, a gradient, a parameter, a buffer, a model's output, an activation that became finite
            again but is not what fp32 gives, a value the host read, or one that was there when the program ended.
        causes: indices of the events it comes from.
        step: as in `Site`.
        is_loss: one number that leads to gradients, which the host read.
        reference: of a loss, its size in an fp32 run, without the loss scale; 0 where that is not known.
    """

    kind: SinkKind
    name: str
    causes: frozenset[int]
    step: int
    is_loss: bool = False
    reference: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Magnitude of one module output or one parameter gradient.

    Attributes:
        kind: output of a module in forward, or gradient of a parameter.
        root, cls: class names of the outermost module and of the module.
        name: module or parameter name, which two networks can share.
        owner: identity of the module or parameter.
        rms: root mean square of the finite values, in fp64.
        amax: largest finite magnitude.
        step, call: as in `Site`; how many calls of the same module came before, in this step.
        reference: largest magnitude in an fp32 run, where it is known to differ; inf where that overflows too.
    """

    kind: Literal["output", "gradient"]
    root: str
    name: str
    cls: str
    dtype: str
    rms: float
    amax: float
    nonfinite: int
    step: int
    call: int
    owner: int = 0
    reference: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LostUpdate:
    """Updates of one 16-bit parameter that rounding swallowed in one optimizer step.

    Attributes:
        name: of the parameter or state, or its shape where it has none.
        dtype: short name of its format.
        optimizer: class name; "the program" or "the forward" where that updates it itself; empty for a state to which a forward adds.
        intended: elements whose update, computed in fp32, is not zero.
        lost: those of them whose stored value did not change.
        site: what ran; of several ops alike in one step, the first.
    """

    name: str
    dtype: str
    optimizer: str
    intended: int
    lost: int
    site: Site


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushedGradient:
    """What fp16 left of one parameter's gradient in one step.

    Attributes:
        flushed: those that are 0 and are not 0 in fp32, from the op on that flushed them.
        flush: where most of them were lost.
        wanted_scale: factor that keeps nearly all of them.
        step: as in `Site`.
    """

    name: str
    numel: int
    flushed: int
    flush: Flush | None
    loss_scale: float
    wanted_scale: float
    step: int


LintRule = Literal[
    "integers-in-16-bit", "ids-in-16-bit", "constant-lost", "squares-near-overflow", "log-of-one-plus", "finite-difference", "amplified-rounding", "rounded-index", "masked-row", "buffer-in-16-bit", "half-accumulator", "backward-in-region",
    "half-weights-in-region", "loss-in-16-bit", "clip-before-unscale", "scaled-step", "no-loss-scale", "zero-learning-rate", "cleared-gradients", "zero-gradients", "exploding-step", "exploding-loop", "uncleared-gradients", "no-gradients", "stale-cast",
]  # fmt: skip
LintCase = Literal[
    "", "arange", "sum", "underflow", "overflow", "close-results", "weights", "probabilities", "by-index", "gradients", "hook", "scaler", "tiny", "one-number", "masters", "answer", "factors",
]  # fmt: skip
"""Cases of one rule that need other words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lint:
    """Code that loses numbers, seen in a program that may still be finite.

    Attributes:
        kernel: the op, as torch calls it; empty where it is none.
        dtype: the 16-bit format at work.
        what: the tensor, buffer, parameter or constant, in words.
        value: the number the rule is about.
        case: which of the rule's cases it is; empty where the rule has one, and for the usual one.
    """

    rule: LintRule
    site: Site
    kernel: str
    dtype: str
    what: str
    value: float
    case: LintCase = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRange:
    """Exponents of what one line of source computed: of sampled values, and of the largest ones.

    Attributes:
        dtypes: of the results, short names, sorted.
        lowest: exponent of the smallest finite magnitude above 0; None if there is none.
        highest: exponent of the largest finite magnitude, of all values; None if there is none above 0.
        middle: exponents between which nine tenths of the magnitudes lie; None if there are none.
        zeros: share of values that are 0.
        ops: plain names, sorted.
    """

    file: str
    line: int
    phase: Phase
    dtypes: tuple[str, ...]
    lowest: int | None
    highest: int | None
    middle: tuple[int, int] | None
    zeros: float
    ops: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRecord:
    """Everything a trace saw.

    Attributes:
        model: class name of the traced model, or of the first one seen.
        lost, lints: lost updates, and lint rules that the code broke.
        ops: number of ops seen.
        first, steps: the number of the first step, and that behind the last one begun; an evaluation begins none.
        rank, torch: of this process; version.
        flushed: gradients, and what fp16 flushed of them.
        forwards, inferences: outermost modules that ran with gradients on, and without.
        updates: optimizer steps taken.
        taken: the steps in which one was.
        skipped: those that a loss scaler left out.
        ended: the error that ended the program; empty if there was none.
        elsewhere: names of other threads that trained modules, unseen.
        unreached: parameters beside others that no gradient reached, and the line that detached what they computed; None where none did.
    """

    model: str
    events: tuple[Event, ...]
    sinks: tuple[Sink, ...]
    sizes: tuple[Size, ...]
    lost: tuple[LostUpdate, ...]
    lints: tuple[Lint, ...]
    lines: tuple[LineRange, ...]
    ops: int
    steps: int
    rank: int
    torch: str
    first: int = 0
    flushed: tuple[FlushedGradient, ...] = ()
    forwards: int = 0
    inferences: int = 0
    backwards: int = 0
    updates: int = 0
    taken: frozenset[int] = frozenset()
    skipped: int = 0
    ended: str = ""
    elsewhere: tuple[str, ...] = ()
    unreached: tuple[tuple[str, Frame | None], ...] = ()
