"""What torch's own kernels leave to gain on a CPU: each workload beside a run of it that nothing of mezzo's is part of.

Run: `python benchmarks/limits.py [launch] [text] [recipe] [casts] [memory] [compiled] [fixed] [step] [lstm] [checked] [rows] [ROUNDS]`; all without a name. It prints a table
and one line of JSON. The ways take turns, a step each; figures are medians.

`launch` and `text`: BERT. "16 bit" keeps nothing in fp32: weights and moments in bf16, under torch.autocast, stepped by torch's
fused AdamW without a check, unscaling or clipping. It cannot be trained with, and is what a prepared step would take if
masters, decisions and binding cost nothing. One thread, its processor time.

`recipe`: "products" are those of a step alone, by torch.mm into memory that is there; "roofline" is that of `mezzo bench recipe`.
All threads, wall time.

`casts`: the default path. "weight casts" makes the 16-bit copy of every matrix and kernel once, in memory that is there: what a step
would gain if its copies came for nothing. All threads, wall time, the C library keeping memory.

`memory`: MB that tensors take at the largest moment of a step: at the loss, when all that backward reads is kept, or at the end of backward,
when all gradients are there. Under torch.autocast they are counted; "bf16-master" is what is left of the same step with weights and
remainders of 2 bytes, moments of 8 and gradients of 2 a parameter, and no casts of weights. "live" is what torch's profiler counts in a step
as it runs, on top of weights, remainders and moments: what is allocated for an instant is in it, what the C library keeps is not. Nothing is timed.

`compiled`: LoRA at batch 1. Compiled, a region's casts are part of the graph, and no copy outlives it: "weight casts" makes those of the
frozen weights into fresh memory. "frozen in bf16" trains adapters on layers that were stored in bf16 before. All threads, wall time.

`fixed`: training steps of three linear layers so small that nothing is computed: what a prepared step costs whatever the model. One
thread, wall time, twenty times the rounds.

`step`: the update alone. "same bytes" reads as many as the gradients are, twice, and changes in place as many as weights, remainders and
moments are: nothing is computed, and no more than one array is walked at a time. All threads, wall time.

`rows`: a decoder layer 4096 wide, in steps of generation for 1 and 8 sequences. "weights read" sums the bits of all its matrices, stored in
16 bit, and multiplies nothing: no kernel that reads them is faster. All threads, wall time.

`lstm`: "its kernels" are forward and backward of the LSTM layers alone, stored in bf16: no embedding, no head, no loss, no update. One
thread, its processor time.

`checked`: ResNet, LSTM, the recipe, and networks of three narrower layers, of which ten times the rounds. "checked" is a step under torch.autocast that does by torch's own ops what a guard has to do: the norm of all gradients is
read, a step that is not finite is left out, and the statistics of batch norms are copied, so that they can be given back. All threads, wall time, the C
library keeping memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import mezzo
from mezzo import keep_memory
from mezzo.bench.hardware import describe_machine
from mezzo.bench.roofline import measure_peak_rates, roofline_seconds
from mezzo.bench.variant import VARIANTS
from mezzo.bench.workload import Setting, Workload
from mezzo.bench.workloads.bert import BertLogits, Overhead, Text, classification_loss, review_batches
from mezzo.bench.workloads.inference import Inference
from mezzo.bench.workloads.recipe import Lora, LoraLinear, Recipe, Scaling, make_model, mean_squared_error
from mezzo.bench.workloads.step_alone import Step
from mezzo.bench.workloads.zoo import Gpt2, Llama, Lstm, ModelSteps, Resnet, Vit

CPU = torch.device("cpu")
SETTING = Setting(device=CPU, dtype=torch.bfloat16)
WARM_UP = 8
"""More than the steps whose invariants are looked at."""
Way = Callable[[], object]
Batch = tuple[Tensor, Tensor, Tensor]


def medians(ways: dict[str, Way], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median milliseconds of each way, a call each in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM_UP + rounds):
        for name, way in ways.items():
            start = clock()
            way()
            if turn >= WARM_UP:
                seconds[name].append(clock() - start)
    return {name: 1e3 * statistics.median(found) for name, found in seconds.items()}


def built(workload: Workload, variant: str) -> Way:
    """Return a step of a variant, as `mezzo bench` builds it."""
    return workload.build(VARIANTS[variant], SETTING).run


def sixteen_bit(workload: Overhead | Text, batch: Batch) -> Way:
    """Return a step of a BERT that keeps nothing in fp32."""
    torch.manual_seed(0)
    model = BertLogits(workload.size).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = classification_loss(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def sixteen_bit_forward(workload: Overhead, batch: Batch) -> Way:
    """Return a forward of a BERT whose weights are bf16."""
    torch.manual_seed(0)
    model = BertLogits(workload.size).to(torch.bfloat16).eval()

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            classification_loss(model, batch)

    return forward


def launch(rounds: int) -> dict[str, dict[str, float]]:
    """Measure the launch-bound BERT of `mezzo bench overhead`."""
    torch.set_num_threads(1)
    ids = torch.randint(100, (1, 8))
    batch = (ids, torch.ones_like(ids), torch.zeros(1, dtype=torch.int64))
    train, evaluate = (Overhead(steps=1, modes=(mode,)) for mode in ("train", "eval"))
    named = ("torch-autocast", "mezzo-autocast", "prepare", "prepare-master")
    ways = {name: built(train, name) for name in named} | {"16 bit": sixteen_bit(train, batch)}
    forwards = {name: built(evaluate, name) for name in named} | {"16 bit": sixteen_bit_forward(evaluate, batch)}
    return {
        "launch-bound, train": medians(ways, rounds, time.thread_time),
        "launch-bound, eval": medians(forwards, rounds, time.thread_time),
    }


def text(rounds: int) -> dict[str, dict[str, float]]:
    """Measure fine-tuning steps of BERTs: the size of `mezzo bench text` on a CPU, and wider layers."""
    torch.set_num_threads(1)
    sizes = {
        "4 x 256, batch 32 x 64": Text(layers=4, width=256, batch_size=32, tokens=64, num_batches=1, steps=1),
        "2 x 768, batch 8 x 64": Text(layers=2, width=768, batch_size=8, tokens=64, num_batches=1, steps=1),
        "2 x 768, batch 32 x 64": Text(layers=2, width=768, batch_size=32, tokens=64, num_batches=1, steps=1),
    }
    found = {}
    for name, workload in sizes.items():
        batch = review_batches(workload.size, workload.batch_size, workload.tokens, 1, CPU)[0]
        ways = {variant: built(workload, variant) for variant in ("torch-amp", "prepare-master")}
        found[f"text {name}"] = medians(ways | {"16 bit": sixteen_bit(workload, batch)}, rounds, time.thread_time)
    return found


def products(size: Recipe) -> Way:
    """Return the products of one step, into memory that is there, in the order of forward and backward."""
    count, width = size.num_layers, size.in_size

    def bf16(*shape: int) -> Tensor:
        return torch.randn(*shape).to(torch.bfloat16)

    inputs, weights = bf16(size.batch_size, width), [bf16(width, width) for _ in range(count)]
    outputs, errors = ([bf16(size.batch_size, width) for _ in range(count)] for _ in range(2))
    grads = [bf16(width, width) for _ in range(count)]

    def run() -> None:
        for layer in range(count):
            torch.mm(outputs[layer - 1] if layer else inputs, weights[layer].t(), out=outputs[layer])
        for layer in reversed(range(count)):
            error = errors[layer]
            torch.mm(error.t(), outputs[layer - 1] if layer else inputs, out=grads[layer])
            if layer:
                torch.mm(error, weights[layer], out=errors[layer - 1])

    return run


def recipe(rounds: int) -> dict[str, dict[str, float]]:
    """Measure the recipe at three widths."""
    found = {}
    peak_rates = measure_peak_rates(CPU, ("bf16",), 6.0)
    for width in (1024, 2048, 4096):
        size = Recipe(in_size=width, out_size=width, num_batches=1, epochs=1)
        ways = {name: built(size, name) for name in ("torch-amp", "prepare-master")}
        row = medians(ways | {"products": products(size)}, rounds, time.perf_counter)
        again = measure_peak_rates(CPU, ("bf16",), 6.0)
        peak_rates = peak_rates.best(again)
        found[f"recipe 512 x {width} x 3"] = row | {
            "roofline": 1e3 * roofline_seconds(size.roofline("bf16"), peak_rates, "bf16")
        }
    return found


def weight_casts(model: nn.Module) -> Way:
    """Return the casts of all matrices and kernels of a model, each into a copy that is there."""
    pairs = [(p.detach(), p.detach().to(torch.bfloat16)) for p in model.parameters() if p.ndim >= 2]

    def run() -> None:
        for weight, copy in pairs:
            copy.copy_(weight)

    return run


def casts(rounds: int) -> dict[str, dict[str, float]]:
    """Measure the default path beside the casts of its weights."""
    found = {}
    with keep_memory():
        for workload in (Gpt2(steps=1), Resnet(steps=1), Lstm(steps=1)):
            ways = {"prepare": built(workload, "prepare"), "weight casts": weight_casts(workload.make_model())}
            found[f"casts {type(workload).__name__} {workload.label}"] = medians(ways, rounds, time.perf_counter)
        size = Recipe(in_size=2048, out_size=2048, num_batches=1, epochs=1)
        model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(size.num_layers)])
        ways = {"prepare": built(size, "prepare"), "weight casts": weight_casts(model)}
        found["casts recipe 512 x 2048 x 3"] = medians(ways, rounds, time.perf_counter)
    return found


def kept_for_backward(workload: ModelSteps, model: nn.Module) -> dict[int, int]:
    """Return the bytes of each storage that a step under torch.autocast keeps for backward, beside the weights, by address."""
    weights, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = workload.make_batch()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = workload.loss(model, batch)
    del loss
    return {address: count for address, count in kept.items() if address not in weights}


def live_bytes(run: Way) -> int:
    """Return the bytes of tensors that are there at the largest moment of a step, above those that were before it."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(str(trace := Path(folder) / "trace.json"))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes))


def live(workload: ModelSteps, count: int, variant: str) -> float:
    """Return the MB of tensors at the largest moment of a step of a variant that has been warmed up."""
    run = built(dataclasses.replace(workload, steps=1), variant)
    for _ in range(4):  # the invariants look at the first ones
        run()
    return (12 * count + live_bytes(run)) / 1e6


def memory(_: int) -> dict[str, dict[str, float]]:
    """Count the memory of training steps of more than ten million parameters."""
    found = {}
    for workload in (Gpt2(), Llama(), Vit(), Resnet()):
        model = workload.make_model()
        count = sum(p.numel() for p in model.parameters())
        casts = 2 * sum(p.numel() for p in model.parameters() if p.ndim >= 2 and not _is_embedding(model, p))
        kept = sum(kept_for_backward(workload, model).values())
        found[f"memory {type(workload).__name__} {workload.label}"] = {
            "torch.autocast": max(12 * count + kept, 16 * count) / 1e6,
            "bf16-master": max(12 * count + kept - casts, 14 * count) / 1e6,
            "kept for backward": kept / 1e6,
            "torch.autocast, live": live(workload, count, "torch-autocast"),
            "bf16-master, live": live(workload, count, "prepare-master"),
        }
    return found


def _is_embedding(model: nn.Module, p: Tensor) -> bool:
    """Whether a parameter is only looked up, and so never cast."""
    users = [module for module in model.modules() if any(p is own for own in module.parameters(recurse=False))]
    return all(isinstance(module, nn.Embedding) for module in users)


def compiled(rounds: int) -> dict[str, dict[str, float]]:
    """Measure LoRA at batch 1, where a compiled step casts its frozen weights and an eager one keeps their copies."""
    size = Lora.for_device(CPU)
    point = dataclasses.replace(size, batches=(1,), steps=1)
    frozen = [torch.randn(point.width, point.width) for _ in range(point.layers)]
    ways = {name: built(point, name) for name in ("prepare-master", "prepare-master+compile")}
    ways["weight casts"] = lambda: [weight.to(torch.bfloat16) for weight in frozen]
    ways["frozen in bf16"], ways["frozen in bf16, compiled"] = (stored_in_bf16(point, is_on) for is_on in (False, True))
    return {"LoRA, batch 1": medians(ways, rounds, time.perf_counter)}


def stored_in_bf16(size: Lora, is_compiled: bool) -> Way:
    """Return a prepared step of adapters on frozen layers that are bf16 already."""
    model = nn.Sequential(*[m for _ in range(size.layers) for m in (LoraLinear(size.width, size.rank), nn.ReLU())])
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.base.to(torch.bfloat16)
    adapters = [p for p in model.parameters() if p.requires_grad]
    amp = mezzo.prepare(model, torch.optim.AdamW(adapters, fused=True), "bf16-master")
    if is_compiled:
        model.compile()
    inputs, targets = torch.randn(1, size.width), torch.randn(1, size.width)

    def step() -> None:
        amp.backward(nn.functional.mse_loss(model(inputs), targets))
        amp.step()
        amp.zero_grad()

    return step


def fixed(rounds: int) -> dict[str, dict[str, float]]:
    """Measure steps in which next to nothing is computed."""
    torch.set_num_threads(1)
    size = Recipe(in_size=16, out_size=16, batch_size=8, num_batches=1, epochs=1)
    ways = {name: built(size, name) for name in ("torch-autocast", "torch-amp", "prepare", "prepare-master")}
    return {"fixed cost of a step": medians(ways, 20 * rounds, time.perf_counter)}


def same_bytes(count: int) -> Way:
    """Return the traffic of a step of 16-bit weights: gradients of 2 bytes read twice, 12 bytes a parameter changed in place."""
    gradients, written = torch.zeros(count // 2), torch.zeros(3 * count)

    def run() -> None:
        gradients.sum()
        gradients.sum()
        written.neg_()

    return run


def step(rounds: int) -> dict[str, dict[str, float]]:
    """Measure the step alone beside its traffic."""
    found = {}
    for count in (10**7, 10**8):
        size = Step(parameters=(count,), steps=1)
        ways = {"same bytes": same_bytes(count)}
        ways |= {name: built(size, name) for name in ("prepare-master", "prepare", "fp32", "torch-amp")}
        found[f"step of {count:.0e} parameters"] = medians(ways, rounds, time.perf_counter)
    return found


def lstm_kernels(size: Lstm) -> Way:
    """Return forward and backward of the LSTM layers of a workload, in bf16 throughout."""
    torch.manual_seed(0)
    layers = nn.LSTM(size.width, size.width, size.layers, batch_first=True).to(torch.bfloat16)
    inputs = torch.randn(size.batch_size, size.tokens, size.width).to(torch.bfloat16).requires_grad_()
    grad = torch.randn_like(inputs)

    def run() -> None:
        layers.zero_grad()
        torch.autograd.backward(layers(inputs)[0], grad)

    return run


def lstm(rounds: int) -> dict[str, dict[str, float]]:
    """Measure training steps of LSTM layers beside the kernels in them."""
    torch.set_num_threads(1)
    size = Lstm(steps=1)
    ways = {name: built(size, name) for name in ("torch-autocast", "prepare", "prepare-master")}
    with keep_memory():
        return {f"lstm {size.label}": medians({"its kernels": lstm_kernels(size)} | ways, rounds, time.thread_time)}


def with_a_check(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Way:
    """Return a step under torch.autocast that takes no update from gradients that are not finite."""
    buffers = list(model.buffers())
    before = [buffer.clone() for buffer in buffers]

    def run() -> None:
        for copy, buffer in zip(before, buffers, strict=True):
            copy.copy_(buffer)
        with torch.autocast("cpu", torch.bfloat16):
            found = loss()
        torch.autograd.backward(found)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if bool(norm.isfinite()):
            optimizer.step()
        optimizer.zero_grad()

    return run


def checked_model(workload: ModelSteps) -> Way:
    """Return a checked step of a model of `mezzo bench`, by torch's fused AdamW."""
    torch.manual_seed(0)
    model, batch = workload.make_model(), workload.make_batch()
    return with_a_check(model, lambda: workload.loss(model, batch), torch.optim.AdamW(model.parameters(), fused=True))


def checked_recipe(size: Recipe) -> Way:
    """Return a checked step of the recipe's layers, by torch's fused SGD."""
    torch.manual_seed(0)
    model = make_model(size.in_size, size.out_size, size.num_layers)
    batch = torch.randn(size.batch_size, size.in_size), torch.randn(size.batch_size, size.out_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=size.lr, fused=True)
    return with_a_check(model, lambda: mean_squared_error(model, batch), optimizer)


def checked(rounds: int) -> dict[str, dict[str, float]]:
    """Measure training steps of a ResNet, of LSTM layers and of small networks beside those that torch checks."""
    found = {}
    sizes = [Scaling(width=width, batch=128, depth=3, steps=1).recipe for width in (128, 256, 512, 1024)]
    recipe = Recipe(in_size=2048, out_size=2048, num_batches=1, epochs=1)
    large: list[tuple[Workload, Way]] = [(one, checked_model(one)) for one in (Resnet(steps=1), Lstm(steps=1))]
    large.append((recipe, checked_recipe(recipe)))
    small: list[tuple[Workload, Way]] = [(one, checked_recipe(one)) for one in sizes]
    with keep_memory():
        for workload, way in large + small:
            ways = {"torch-autocast": built(workload, "torch-autocast"), "checked": way}
            ways |= {name: built(workload, name) for name in ("prepare", "prepare-master")}
            turns = 10 * rounds if workload in sizes else rounds
            found[f"checked {type(workload).__name__} {workload.label}"] = medians(ways, turns, time.perf_counter)
    return found


def rows(rounds: int) -> dict[str, dict[str, float]]:
    """Measure forwards of few rows beside reading the weights."""
    found = {}
    for batch in (1, 8):
        size = Inference(models=("decoder",), batches=(batch,), forwards=1)
        (phase,) = size.roofline("bf16")
        matrix = 2**24
        weights = [torch.ones(matrix // 4) for _ in range(round(phase.moved_bytes / matrix))]
        ways: dict[str, Way] = {"weights read": lambda held=weights: [part.sum() for part in held]}  # type: ignore[misc]  # bound now
        ways |= {name: built(size, name) for name in ("torch-16bit", "prepare", "prepare-master")}
        found[f"decoder, batch {batch}"] = medians(ways, rounds, time.perf_counter)
    return found


PARTS = {
    "launch": launch,
    "text": text,
    "recipe": recipe,
    "casts": casts,
    "memory": memory,
    "compiled": compiled,
    "fixed": fixed,
    "step": step,
    "lstm": lstm,
    "checked": checked,
    "rows": rows,
}
UNITS = {"memory": "MB"}


def main() -> None:
    """Measure what was asked for, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="PART|ROUNDS", help=f"{', '.join(PARTS)}, or a number of rounds")
    words = parser.parse_args().words
    if unknown := [word for word in words if word not in PARTS and not word.isdigit()]:
        parser.error(f"there is no part {unknown[0]!r}; write one of {', '.join(PARTS)}, or a number of rounds.")
    asked = [word for word in words if word in PARTS] or list(PARTS)
    rounds = next((int(word) for word in words if word.isdigit()), 51)
    threads = torch.get_num_threads()
    found: dict[str, dict[str, float]] = {}
    for name in asked:
        torch.set_num_threads(threads)
        rows = PARTS[name](rounds)
        for title, row in rows.items():
            first, *_ = row.values()
            unit = UNITS.get(name, "ms")
            print(
                f"{title:28}",
                "  ".join(f"{way} {taken:.3f} {unit} ({taken / first:.2f}x)" for way, taken in row.items()),
            )
        found |= rows
    print(
        json.dumps({"unit": "ms, and MB of memory", "rounds": rounds, "found": found, "machine": describe_machine(CPU)})
    )


if __name__ == "__main__":
    main()
