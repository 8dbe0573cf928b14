"""Lint rules: code that loses numbers before anything is inf or NaN, seen op by op."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._torch import version
from ..binding import bound_of
from ..errors import plural
from ..formats import LOW_DTYPES, dtype_name, format_of, parse_dtype, widest
from .amplified import Amplified, RoundedIndices
from .buffers_at_rest import BuffersAtRest, exact_integers
from .frames import argument_of, functions_of, is_called_from, is_handed_by_autograd
from .measure import amax, numbers, rerun_wide, share_off
from .ops import CASTS, Call
from .records import Event, Lint, LintCase, LintRule, Site
from .reference_path import ReferencePath
from .verdict import number
from .wide_values import StorageNotes, run_in_fp32

_TAKES_CONSTANT = frozenset({
    "add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "maximum", "full", "fill", "full_like", "new_full",
    "masked_fill", "where", "scalar_tensor",
})  # fmt: skip
_BOUNDS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh"})
_KEEP_WIDE = re.compile(r"(^|[._])running_(mean|var)$")
_HEADROOM = 4.0
"""Squares within two binades of the format's limit are about to overflow."""
_CLIPS, _SCALER, _OWN_SCALER = "torch/nn/utils/clip_grad.py", "torch/amp/grad_scaler.py", "mezzo/loss_scale/scaler.py"
_CAUSES = frozenset({"integers-in-16-bit", "ids-in-16-bit", "buffer-in-16-bit", "finite-difference", "log-of-one-plus"})
"""Rules that name why an op of the same module makes rounding large."""
_MOST = 64
"""Lints of one rule that are kept."""
_HALF = 1 / 2
"""How far a difference or a logarithm must lie from what fp32 has."""
_LOOKED_AT = 16
"""Additions by one line to one sum from one look at what it lost to the next."""
_SUMS_BY_INDEX = frozenset({"index_add", "scatter_add", "scatter_reduce", "index_put", "embedding_dense_backward"})
"""Ops that add up what has one index, one number after another: counts, messages to a node, the gradient of a row that is read often."""
_ADDS = _SUMS_BY_INDEX | {"add", "sub"} - {"embedding_dense_backward"}
_ADDS_TO = frozenset({"add", "sub", "lerp", "copy"})
_LARGEST_RATE = 4.0
"""Gradients times more are no step of unscaled ones."""
_LOST = 2.0**-4
"""Share of a sum, at its largest, by which it is off: rounding that goes either way leaves less of hundreds of additions."""


@dataclass(frozen=True, slots=True)
class _RunningSum:
    """What one line adds up: after how many additions, in fp32 from the second on, and its largest norm."""

    line: str
    count: int = 1
    wide: Tensor | None = None
    top: Tensor | None = None


class LintWatch:
    """Checks each op against the rules that one op can break. Syncs: yes, at the ops it judges.

    Args:
        reference: what tensors would hold without rounding.

    Attributes:
        of_risks: whether what may lose numbers counts too where it did not: a loss in 16 bit, the eps that torch's normalize fills in.
        scale: what a scaler of torch's multiplied the last loss by, until gradients are unscaled; 1 before and after.
    """

    def __init__(self, reference: ReferencePath) -> None:
        self._reference = reference
        self.of_risks = False
        self._found: dict[tuple[object, ...], Lint] = {}
        self._has_fp16 = self._has_torch_scaler = self._has_scaler = self._has_scaled_grads = False
        self.scale = self._last_scale = 1.0
        self._scaled: StorageNotes[float] = StorageNotes()  # gradients, by what they were multiplied by since
        self._clipped: Site | None = None
        self._sums: StorageNotes[_RunningSum] = StorageNotes()
        self._casts: StorageNotes[tuple[Tensor, int, tuple[int, ...]]] = (
            StorageNotes()
        )  # of which weight and version, with strides
        self._one_plus_lost: StorageNotes[float] = StorageNotes()
        self._steps: set[float] = set()
        self._rest, self.amplified = BuffersAtRest(reference), Amplified(reference)
        self.indices = RoundedIndices(self.amplified, reference)

    def records(self, *, has_flushed: bool = True) -> tuple[Lint, ...]:
        """Return what was noticed, each line once a rule, given whether fp16 flushed a number of a gradient."""
        is_told = has_flushed or self.of_risks
        of_ids = {x.site.frame for x in self._found.values() if x.rule == "ids-in-16-bit"}
        named = {(x.site.root, x.site.module) for x in self._found.values() if x.rule in _CAUSES}
        sums = {(x.site.frame, x.site.op) for x in self._found.values() if x.rule == "half-accumulator"}
        lasting = [x for x in self.amplified.lasting() if (x.site.frame, x.site.op) not in sums]
        amplified = [x for x in lasting if (x.site.root, x.site.module) not in named][:_MOST]
        found = [x for x in (*self._found.values(), *amplified) if is_told or x.rule != "no-loss-scale"]
        return tuple(x for x in found if x.rule != "integers-in-16-bit" or x.site.frame not in of_ids)

    def add(
        self,
        rule: LintRule,
        site: Site,
        dtype: torch.dtype,
        what: str,
        value: float,
        kernel: str = "",
        case: LintCase = "",
    ) -> None:
        """Note a broken rule, once for each line and op."""
        key = (rule, str(site.frame), site.module, kernel, "" if kernel else what)
        if key not in self._found and sum(x.rule == rule for x in self._found.values()) < _MOST:
            name = dtype_name(dtype)
            self._found[key] = Lint(rule=rule, site=site, kernel=kernel, dtype=name, what=what, value=value, case=case)

    def see(self, call: Call, site: Site, name_of: Callable[[Tensor], str]) -> None:
        """Take in one op. Syncs: yes, at the ops it judges."""
        name, is_forward = call.facts.name, site.phase == "forward"
        is_outside = is_forward and not site.root
        # a scaler that is off multiplies nothing, but runs the step of an optimizer that does
        if is_outside and name == "mul" and not self._has_torch_scaler:
            self._has_torch_scaler = is_called_from(_SCALER)
            self._has_scaler = self._has_scaler or self._has_torch_scaler or is_called_from(_OWN_SCALER)
        if is_outside and self._has_scaled_grads:
            self._clip(call, site)
            self._step_by_hand(call, site)
        if name == "to" and call.inputs and not call.out and call.returned.dtype is not torch.bool:
            self._ids(call)
        if name in _BOUNDS and site.phase == "backward":
            self._bound(call, site)
        if name in ("log", "to") and call.inputs and self.of_risks:
            self._log(call, site)
        if is_forward:
            for found in self._rest.see(call):
                self.add("buffer-in-16-bit", site, *found)
            self._difference(call, site)
            self._stale(call, site, name_of)
            self.indices.see(call, site)
            self.amplified.slope(call, site)
        low = next((t for t in call.out if t.dtype in LOW_DTYPES), None)
        if low is None:
            return
        if is_forward:
            self._has_fp16 = self._has_fp16 or (low.dtype is torch.float16 and len(call.inputs) > 0)
            self._integers(call, site, low)
            self._squares(call, site, low)
            self._accumulator(call, site, low)
            self._one_plus(call, low)
        if is_forward or site.op == "AccumulateGrad":
            self._running_sum(call, site, low)
        if name in _SUMS_BY_INDEX:
            self._sum_by_index(call, site, low)
        if site.phase != "backward":
            self._constant(call, site, low)

    def _integers(self, call: Call, site: Site, low: Tensor) -> None:
        name = call.facts.name
        if name == "arange":
            if bool((low.diff() == 0).any()):
                self.add("integers-in-16-bit", site, low.dtype, "arange", amax(low), call.facts.kernel, "arange")
            return
        source = _counted(call, low) if name == "cumsum" else call.args[0] if name == "to" and call.args else None
        if not isinstance(source, Tensor) or source.is_nested or source.dtype in LOW_DTYPES or source.is_complex():
            return
        if not source.numel() or (source.requires_grad and source.is_leaf):  # a weight, as a bias of 1234 is
            return
        wide = source.to(widest(source.device))
        top = amax(wide)
        # fp32 has nothing but whole numbers beyond those that it holds exactly
        is_count = not source.is_floating_point() or top < exact_integers(torch.float32)
        is_beyond = exact_integers(low.dtype) < top < math.inf
        whole = is_count and is_beyond and bool((wide == wide.round()).all())
        moved = wide[low.to(wide.dtype) != wide] if whole else wide.new_empty(0)
        # one number below 0 is what a mask adds to scores
        if moved.numel() and not (float(moved.max()) < 0 and bool((moved == moved[0]).all())):
            case: LintCase = "sum" if name == "cumsum" else ""
            self.add("integers-in-16-bit", site, low.dtype, site.called or name, top, call.facts.kernel, case)

    def _ids(self, call: Call) -> None:
        """Look at numbers that become whole ones: whether a cast rounded them when they were whole before."""
        read = call.originals[0]
        were, cast = self._reference.get(read), self._reference.cast_behind(read)
        if were is None or cast is None:
            return
        moved = (were == were.round()) & (were != read)
        if bool(moved.any()):
            what = f"{number(float(were[moved][0]))} came back as {number(float(read[moved][0]))}"
            self.add("ids-in-16-bit", cast, self._reference.low, what, float(moved.sum()), call.facts.kernel)

    def _constant(self, call: Call, site: Site, low: Tensor) -> None:
        name = call.facts.name
        if name not in _TAKES_CONSTANT and name not in ("mul", "div"):
            return
        # the second where a mode of mezzo's ran it op by op
        is_torchs = site.called != name and site.called in vars(functional)
        if not self.of_risks and (is_torchs or functions_of(functional.__file__) - {name}):
            return
        facts = format_of(low.dtype)
        for value in [a for a in call.args if isinstance(a, float) and math.isfinite(a)]:
            vanishes = name in _TAKES_CONSTANT and 0 < abs(value) <= facts.smallest / 2
            if vanishes or (abs(value) > facts.max and name != "div"):
                case: LintCase = "underflow" if vanishes else "overflow"
                self.add("constant-lost", site, low.dtype, number(value), value, call.facts.kernel, case)

    def _bound(self, call: Call, site: Site) -> None:
        """Look at a bound that a hook, or a backward of the program's own, puts on its gradient; one near the loss scale is meant."""
        bound = max([abs(a) for a in (*call.args, *call.kwargs.values()) if isinstance(a, int | float)], default=0.0)
        # else a weight of the loss
        is_scale = self._has_fp16 and self._last_scale >= 256 and math.frexp(self._last_scale)[0] == 0.5
        if not (is_scale and 0 < bound < math.sqrt(self._last_scale) and call.inputs):
            return
        given = call.inputs[0][1]
        if bound < amax(given) < math.inf and is_handed_by_autograd(call.original(given)):
            self.add("clip-before-unscale", site, given.dtype, "a gradient", self._last_scale, case="hook")

    def _squares(self, call: Call, site: Site, low: Tensor) -> None:
        if low.dtype is not torch.float16:
            return
        args, name = call.args, call.facts.name
        is_power = name == "square" or (name == "pow" and numbers(args[1:2], {}) == [2.0])
        is_square = is_power or (name == "mul" and len(args) > 1 and args[0] is args[1])
        if is_square and (top := amax(low)) * _HEADROOM > format_of(low.dtype).max:
            self.add("squares-near-overflow", site, low.dtype, site.called or name, top, call.facts.kernel)

    def _difference(self, call: Call, site: Site) -> None:
        """Look at a difference that is divided by what was added to an argument before: whether it is rounding. Syncs: there."""
        given = [abs(a) for a in call.args if isinstance(a, float) and 0 < abs(a) < 1]
        if call.facts.name in ("add", "sub"):
            self._steps.update(step for one in given for step in (one, 2 * one, one * one))
        elif call.facts.name == "div" and call.inputs and given and given[0] in self._steps:
            read = call.originals[0]
            were = self._reference.get(read)
            off = 0.0 if were is None else share_off(read, were)
            if off > _HALF:
                self.add("finite-difference", site, self._reference.low, f"{off:.0%}", given[0], call.facts.kernel)

    def _stale(self, call: Call, site: Site, name_of: Callable[[Tensor], str]) -> None:
        """Look at casts of weights, which torch's region keeps until it is left: whether the weights are others by now. Syncs: where they were written."""
        for read, (weight, seen, stride) in self._casts.read_by(call):
            cast = call.original(read).as_strided(weight.shape, stride, 0)
            if version(weight) != seen and not torch.equal(cast, weight.detach().to(cast.dtype)):
                self.add("stale-cast", site, cast.dtype, name_of(weight), 0.0)
        is_kept = torch.is_autocast_cache_enabled() and site.called not in CASTS  # which a program calls
        if is_kept and call.facts.name == "to" and call.out and call.is_tracked:
            weight, cast = call.originals[0], call.out[0]
            if cast.dtype in LOW_DTYPES and self.amplified.is_weight(weight):
                self._casts.note(cast, (weight, version(weight), cast.stride()))

    def _one_plus(self, call: Call, low: Tensor) -> None:
        """Note what 1 + x keeps of x where its logarithm has lost most of it. Syncs: where a program adds 1 to a 16-bit tensor."""
        if not self.of_risks or call.facts.name != "add" or 1 not in numbers(call.args, {}) or len(call.inputs) != 1:
            return
        off = share_off(low.detach().float().log(), call.inputs[0][1].detach().float().log1p())
        if off > _HALF:
            self._one_plus_lost.note(low, off)

    def _log(self, call: Call, site: Site) -> None:
        lost = self._one_plus_lost.get(call.originals[0])
        if lost is not None and call.facts.name == "log":
            self.add("log-of-one-plus", site, call.inputs[0][1].dtype, f"{lost:.0%}", lost, call.facts.kernel)
        elif lost is not None and call.out:
            self._one_plus_lost.note(call.out[0], lost)

    def _accumulator(self, call: Call, site: Site, low: Tensor) -> None:
        """Look at an addition to one number: of a loop it may lose some, of a module, as to a count in a buffer, it did. Syncs: there."""
        if low.dim() or call.facts.kernel not in ("aten.add_", "aten.sub_"):
            return
        old = next((float(t) for _, t in call.inputs if call.original(t) is low), 0.0)
        added = abs(float(wide[0]) - old) if (wide := rerun_wide(call, torch.float32)) else 0.0
        is_lost = float(low.detach()) == old and added > abs(old) * format_of(low.dtype).eps / 4
        if is_lost if site.root else self.of_risks:
            self.add("half-accumulator", site, low.dtype, "a running sum", float(low.detach()), call.facts.kernel)

    def _running_sum(self, call: Call, site: Site, low: Tensor) -> None:
        """Follow what a line adds up in 16 bit, and compare it with the same sum in fp32. Syncs: at every 16th addition."""
        if call.facts.name not in _ADDS:
            for tensor in call.out if call.facts.writes else ():
                self._sums.forget(tensor)
            return
        is_gradient = site.op == "AccumulateGrad"
        line = site.op if is_gradient else str(site.frame)
        made = (low.shape, low.dtype, line)
        sums = ((t, s) for t, s in self._sums.read_by(call) if (t.shape, t.dtype, s.line) == made)
        state, found = next(sums, (low, None))
        if found is None or (found.wide is not None and found.wide.shape != low.shape):
            self._sums.note(low, _RunningSum(line))
            return
        wide = (run_in_fp32(call, {} if found.wide is None else {id(state): found.wide}) or [low.detach().float()])[0]
        count, top = found.count + 1, wide.norm()
        top = top if found.top is None else torch.maximum(top, found.top)
        off = float((low.detach().float() - wide).norm()) if count % _LOOKED_AT == 0 else 0.0
        if off and 0 < _LOST * float(top) < off < math.inf:
            terms = f"gradients of {count} backward passes" if is_gradient else f"{count} terms"
            case: LintCase = "gradients" if is_gradient else ""
            what = f"a sum of {terms}, {off / float(top):.0%} off by now,"
            self.add("half-accumulator", site, low.dtype, what, float(count), call.facts.kernel, case)
        self._sums.forget(call.original(state))
        self._sums.note(low, _RunningSum(line, count, wide, top))

    def _sum_by_index(self, call: Call, site: Site, low: Tensor) -> None:
        """Compare what one op adds up by index in 16 bit with the same in fp32. Syncs: yes."""
        off = share_off(low, wide[0]) if (wide := rerun_wide(call, torch.float32)) else 0.0
        if off > _LOST:
            what = f"what {call.facts.name} adds up, {off:.0%} off,"
            self.add("half-accumulator", site, low.dtype, what, off, call.facts.kernel, case="by-index")

    def end_step(self) -> None:
        """Let go of sums that are no more, and of constants that were added. Host only."""
        self._steps.clear()
        self.amplified.end_step()
        self._sums.drop_gone()

    def softmax(self, event: Event) -> None:
        """Note rows of a softmax with nothing left in them, whose NaN arrived somewhere."""
        if event.full_rows and event.outputs[0].nan:
            rows, dtype = event.full_rows, parse_dtype(event.dtype)
            self.add("masked-row", event.site, dtype, f"{rows} {plural('row', rows)}", float(rows), event.kernel)

    def model(self, model: nn.Module, site: Site, in_region: bool) -> None:
        """Look over a model before it runs: buffers that must stay wide, weights that a region expects wide. Syncs: at buffers in 16 bit."""
        self.amplified.model(model)
        for found in self._rest.enter(model):
            self.add("buffer-in-16-bit", site, *found)
        for name, buffer in model.named_buffers():
            if buffer.dtype in LOW_DTYPES and _KEEP_WIDE.search(name):
                self.add("buffer-in-16-bit", site, buffer.dtype, f"buffer {name}", 0.0)
        low = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dtype in LOW_DTYPES]
        if in_region and low and bound_of(model) is None:
            what = f"{len(low)} trainable parameters, {low[0][0]} first"
            self.add("half-weights-in-region", site, low[0][1].dtype, what, float(len(low)))

    def _clip(self, call: Call, site: Site) -> None:
        """Take in an op between a backward that was scaled and the unscaling; a bound that carries the scale too is meant. Syncs: where a gradient is clamped."""
        bound = argument_of(_CLIPS, "max_norm", "clip_value")
        if bound is None and call.facts.name in _BOUNDS and (clamped := [t for t, _ in self._scaled.read_by(call)]):
            bounds = [abs(x) for x in numbers(call.args, call.kwargs)]
            bound = next((x for x in bounds if x < max(map(amax, clamped))), None)
        if bound is not None and bound < self._last_scale and self._clipped is None:
            self._clipped = site

    def arrived(self, gradient: Tensor) -> None:
        """Take note of a gradient, which carries the loss scale until something takes it off. Host only."""
        if self.scale > 1:
            self._scaled.note(gradient, 1.0)

    def _step_by_hand(self, call: Call, site: Site) -> None:
        """Follow scaled gradients, times the numbers that they are multiplied by, to a weight to which they are added. Syncs: no."""
        name, found = call.facts.name, self._scaled.read_by(call)
        by = next((abs(x) for x in numbers(call.args, call.kwargs) if x), 1.0)
        factor = max((f for _, f in found), default=0.0) * (1 / by if name == "div" else by)
        # another tensor may be made to fit the scale, as the root of a second moment is
        is_known = name in _ADDS_TO or (name in ("mul", "div", "neg", "clone", "to") and len(found) == len(call.inputs))
        is_step = name in _ADDS_TO and call.facts.writes and any(map(self.amplified.is_weight, call.out))
        if is_step and factor * self.scale > _LARGEST_RATE:
            self.add("scaled-step", site, torch.float32, "the program", self.scale)
        for out in call.out:
            if factor and is_known and not is_step:
                self._scaled.note(out, factor)
            else:
                self._scaled.forget(out)

    def unscale(self) -> None:
        """Note that gradients were unscaled, and clipped before it, if they were."""
        self._scaled = StorageNotes()
        self.scale, self._has_scaled_grads = 1.0, False
        if self._clipped is not None:
            self.add("clip-before-unscale", self._clipped, torch.float32, "gradients", self._last_scale)
            self._clipped = None

    def loss(self, loss: Tensor, site: Site, loss_scale: float, region: torch.dtype | None) -> None:
        """Look at the tensor backward starts from, and at the region it starts in. Syncs: where it is 16 bit."""
        self._clipped, self._last_scale, self._has_scaled_grads = None, loss_scale, loss_scale > 1
        self.amplified.loss(loss, site.step, self.of_risks)
        self.scale = loss_scale if self._has_torch_scaler else 1.0
        if region is not None and self.of_risks:
            self.add("backward-in-region", site, region, "backward", 0.0)
        if loss.dtype in LOW_DTYPES and self.of_risks:
            self.add("loss-in-16-bit", site, loss.dtype, "the loss", float(loss.detach()))
        if self._has_fp16 and loss_scale == 1.0:
            case: LintCase = "scaler" if self._has_scaler else ""
            self.add("no-loss-scale", site, torch.float16, "the loss", loss_scale, case=case)


def _counted(call: Call, low: Tensor) -> Tensor | None:
    """Return a running sum of counts as fp32 has it; None for numbers that are whole only because their format has no others. Syncs: yes."""
    given = next((t for _, t in (*call.inputs, *call.whole)), None)
    if given is None or (given.is_floating_point() and not bool((given == given.round()).all())):
        return None
    wide = rerun_wide(call, torch.float32) if given.numel() else None
    return wide[0] if wide and amax(given.float()) < exact_integers(low.dtype) / 2 else None
