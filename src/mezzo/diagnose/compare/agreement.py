"""What a comparison with fp32 writes down: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from ...trace import Frame, Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How well values agree with fp32: signal-to-error ratios in dB, 6 dB to the bit.

    inf: no difference. -inf: not finite where fp32 is, or an error where fp32 has nothing but zeros.

    Attributes:
        local: what was added here: the same inputs, in fp32.
        inherited: what came in with the inputs: fp32 here, on these inputs and on those of an fp32 run.
        total: against a step that ran in fp32 from the start.
    """

    local: float
    inherited: float
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleError:
    """Errors of what one module's own ops made; its submodules' results are taken as they came.

    Attributes:
        module: name below the root, empty for the root itself or outside any module.
        path: as a reader calls it.
        cls: class name.
        forward: its results; None if none of them differs from fp32.
        backward: the gradients of its inputs, likewise.
        weights: the gradients of its parameters, likewise.
        local_share: local error over signal, energies, summed over the three.
    """

    module: str
    path: str
    cls: str
    forward: Agreement | None
    backward: Agreement | None
    weights: Agreement | None
    local_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OpError:
    """Errors of one op on one line of one module.

    Attributes:
        phase: forward or backward.
        module: as in `ModuleError`.
        path: likewise.
        op: plain name; in backward, of the forward op whose gradient ran.
        called: public name of the torch function.
        kernel: the op, as torch calls it.
        dtype: of the result.
        frame: the nearest line of a library or of the user.
        calls: how many results were compared.
        agreement: of its results.
        local_share: local error over signal, energies.
        flops: floating-point operations in 16 bit.
    """

    phase: Phase
    module: str
    path: str
    op: str
    called: str
    kernel: str
    dtype: str
    frame: Frame | None
    calls: int
    agreement: Agreement
    local_share: float
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientError:
    """Error of one parameter's gradient.

    Attributes:
        name: of the parameter.
        total: dB, against an fp32 step.
        share: its part of the error of all gradients, energies; NaN if that is infinite or zero.
    """

    name: str
    total: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFidelity:
    """One step under one policy, beside fp32.

    Attributes:
        policy: its text.
        scale: loss scale of the backward pass.
        loss: as computed.
        reference_loss: in fp32.
        outputs: of the outermost module.
        gradients: of all parameters, as one vector; None without gradients.
        modules: in the order they first computed.
        ops: likewise.
        parameters: in the order of the model.
        flops: floating-point operations of the step, in any format.
        unseen: (kernel, calls) of ops that have no fp32 counterpart; their results count as exact.
        flaw: why the step says nothing of its agreement, such as a loss that is NaN in fp32 too; empty if it does.
    """

    policy: str
    scale: float
    loss: float
    reference_loss: float
    outputs: Agreement
    gradients: Agreement | None
    modules: tuple[ModuleError, ...]
    ops: tuple[OpError, ...]
    parameters: tuple[GradientError, ...]
    flops: int
    unseen: tuple[tuple[str, int], ...]
    flaw: str

    @property
    def low_flops(self) -> int:
        """Floating-point operations in 16 bit."""
        return sum(op.flops for op in self.ops)

    @property
    def figure(self) -> float:
        """The number to improve: total agreement of the gradients, else of the outputs, in dB."""
        return (self.gradients or self.outputs).total


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """An edit of the policy that was tried.

    Attributes:
        edit: text to append to the policy's, after a comma.
        gain: dB that the gradients (without gradients: the outputs) come nearer to fp32.
        gradients: their total agreement after the edit, dB; None without gradients.
        outputs: that of the outputs, dB.
        cost: share of the step's floating-point operations that the edit takes to fp32.
    """

    edit: str
    gain: float
    gradients: float | None
    outputs: float
    cost: float
