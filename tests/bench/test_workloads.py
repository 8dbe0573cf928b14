"""Every workload: it runs, its variants compute the same thing, and its roofline counts the work torch counts."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from tests.tolerance import relative
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mezzo.bench.variant import VARIANTS, Variant
from mezzo.bench.workload import WORKLOADS, Point, Setting, Workload, find_workload
from mezzo.bench.workloads import bert as text
from mezzo.bench.workloads.bert import Overhead, Reviews, review_batches
from mezzo.bench.workloads.inference import DRAWN, DecoderLayer, Inference, draw_weights_
from mezzo.bench.workloads.recipe import Lora, LoraLinear, Recipe
from mezzo.bench.workloads.step_alone import MATRIX, GivenGradients, Step
from mezzo.bench.workloads.zoo import Gpt2, ModelSteps, Vit
from mezzo.errors import BenchError
from mezzo.train.config import TrainConfig
from mezzo.train.data import Corpus, load_corpus

CPU = torch.device("cpu")
SETTING = Setting(device=CPU, dtype=torch.bfloat16)
SMALL = {name: find_workload(name).for_device(CPU).quick() for name in WORKLOADS if name != "reviews"}
POINTS = [pytest.param(point, id=f"{name}: {point.label}") for name, small in SMALL.items() for point in small.points()]
MULTIPLYING = [param for param in POINTS if not param.id.startswith(("step", "lstm"))]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus(TrainConfig())


@functools.cache
def loss(workload: Workload, variant: Variant) -> float:
    """Return the loss of the second round: the same each time, since everything is seeded, so that tests can share it."""
    session = workload.build(variant, SETTING)
    session.warm_up()
    session.run()
    return session.run().item()


@pytest.mark.parametrize("name", SMALL)
def test_points_are_measurable_workloads_with_one_size_each(name: str) -> None:
    for point in SMALL[name].points():
        assert [p.workload for p in point.workload.points() if p.label == point.label] == [point.workload]
        assert type(point.workload).from_fields(dataclasses.asdict(point.workload)) == point.workload


@pytest.mark.parametrize("point", MULTIPLYING)
def test_the_floor_counts_the_products_torch_counts(point: Point) -> None:
    session = point.workload.build(VARIANTS["fp32"], SETTING)
    # The counter does not know the CPU's own attention kernel, nor its LSTM.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        session.run()
    assert session.units * sum(phase.flops for phase in point.workload.roofline("fp32")) == counter.get_total_flops()


def test_the_products_of_the_lstm_by_hand() -> None:
    small = SMALL["lstm"]
    rows, gates = small.batch_size * small.tokens, 4 * small.width
    layer, head = 2 * gates * small.width, small.width * small.vocabulary
    forward, backward, _ = small.roofline("bf16")
    assert forward.flops == 2 * rows * (small.layers * layer + head)
    # The first state is given, so nothing is computed back into it.
    assert backward.flops == 2 * forward.flops - small.layers * 2 * small.batch_size * gates * small.width


@pytest.mark.parametrize("name", [name for name in SMALL if isinstance(SMALL[name], ModelSteps)])
def test_every_weight_is_moved(name: str) -> None:
    count = sum(p.numel() for p in SMALL[name].make_model().parameters())
    assert [p.moved_bytes for p in SMALL[name].roofline("fp32")] == [4 * count, 8 * count, 28 * count]
    assert [p.moved_bytes for p in SMALL[name].roofline("bf16")] == [2 * count, 4 * count, 26 * count]


def test_the_resnet_is_resnet_18() -> None:
    model = find_workload("resnet")(labels=1000).make_model()
    # He et al. 2016 have 11.69 million parameters with a first convolution of 7 x 7; one of 3 x 3 has 7,680 fewer.
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 64 * 3 * (49 - 9)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)


@pytest.mark.parametrize("name", ["gpt2", "llama", "lstm"])
def test_a_token_model_learns_the_token_that_follows(name: str) -> None:
    small = SMALL[name]
    inputs, targets = small.make_batch()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert small.logits(small.make_model(), inputs).shape == (*inputs.shape, small.vocabulary)


@pytest.mark.parametrize("point", POINTS)
def test_switched_off_is_fp32_bit_for_bit(point: Point) -> None:
    scaler = "none" if isinstance(point.workload, Inference) else "mezzo"
    off = Variant(name="off", region="mezzo", scaler=scaler, enabled=False)
    assert loss(point.workload, off) == loss(point.workload, VARIANTS["fp32"])


@pytest.mark.parametrize("point", POINTS)
def test_mezzos_drop_in_is_torchs_bit_for_bit(point: Point) -> None:
    kinds = ("autocast",) if isinstance(point.workload, Inference) else ("autocast", "amp")
    for kind in kinds:
        assert loss(point.workload, VARIANTS[f"mezzo-{kind}"]) == loss(point.workload, VARIANTS[f"torch-{kind}"])


@pytest.mark.parametrize("name", SMALL)
def test_default_variants_run(name: str) -> None:
    small = SMALL[name]
    for variant in small.default_variants(CPU):
        if VARIANTS[variant].keeps or (VARIANTS[variant].wrapper != "none" and name != "gpt2"):
            continue  # the same training in another process; the same wrapper around another model
        assert math.isfinite(loss(small.points()[0].workload, VARIANTS[variant]))


@pytest.mark.parametrize("point", [p for p in POINTS if p.id.startswith(("lora", "inference"))])
def test_copies_that_last_change_nothing_but_the_order_of_sums(point: Point) -> None:
    kept, cast = (loss(point.workload, VARIANTS[f"mezzo-{name}"]) for name in ("persistent", "autocast"))
    assert kept == pytest.approx(cast, rel=relative(torch.bfloat16) if isinstance(point.workload, Inference) else 0)


@pytest.mark.parametrize("point", [p for p in POINTS if p.id.startswith("inference")])
def test_a_converted_model_is_all_16_bit(point: Point) -> None:
    low, full = (loss(point.workload, VARIANTS[name]) for name in ("torch-16bit", "fp32"))
    assert low == torch.tensor(low).item() != full
    assert VARIANTS["torch-16bit"].number_format(torch.bfloat16) == "bf16"


@pytest.mark.parametrize("point", [p for p in POINTS if p.id.startswith("step")])
def test_unscaling_and_clipping_at_one_leave_the_step_as_it_is(point: Point) -> None:
    assert loss(point.workload, VARIANTS["torch-amp"]) == loss(point.workload, VARIANTS["fp32"])


@pytest.mark.parametrize("count", [5, MATRIX * MATRIX, 2 * MATRIX * MATRIX + 5])
def test_parameters_are_as_many_as_asked(count: int) -> None:
    model = GivenGradients(count)
    assert sum(p.numel() for p in model.parameters()) == count


def test_steps_stay_in_memory_where_all_variants_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 24 * 2**18, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert [Step(parameters=(count,)).is_resident(CPU) for count in (10**7, 10**8, 10**9)] == [True, True, False]
    assert not Step(parameters=(10**7,)).is_resident(torch.device("cuda"))


def test_many_parameters_are_stepped_a_few_times() -> None:
    points = Step(parameters=(10**6, 10**8, 10**9)).points()
    assert [point.workload.steps for point in points] == [20, 5, 2]
    assert [point.workload.steps for point in Step(parameters=(10**9,), steps=1).points()] == [1]


def test_given_gradients_are_handed_over_without_a_copy() -> None:
    model = GivenGradients(2 * MATRIX * MATRIX)
    for _ in range(2):
        model().backward()
        assert [p.grad.data_ptr() for p in model.parameters()] == [g.data_ptr() for g in model._gradients]
        model.zero_grad()
    model.to(torch.bfloat16)
    assert GivenGradients(5).to(torch.bfloat16)().dtype is torch.float32


def test_batches_are_the_reviews(corpus: Corpus) -> None:
    size = SMALL["text"].size
    batches = review_batches(size, 3, 16, 2, CPU)
    assert [[part.shape for part in batch] for batch in batches] == [[(3, 16), (3, 16), (3,)]] * 2
    labels = [label for batch in batches for label in batch[2].tolist()]
    assert labels == [corpus.labels.index(row.label) for row in corpus.train[:6]]
    for ids, mask, _ in batches:
        assert torch.equal(mask.bool(), ids != 0)
        assert int(ids.max()) < size.vocabulary
        assert bool((mask.diff(dim=1) <= 0).all())


def test_the_reviews_are_read_before_memory_is_watched() -> None:
    text._encoded_reviews.cache_clear()
    SMALL["text"].load()
    SMALL["text"].build(VARIANTS["fp32"], SETTING)
    found = text._encoded_reviews.cache_info()
    assert (found.misses, found.hits) == (1, 1)


def test_a_whole_training(tmp_path: Path) -> None:
    words = {"good": "pos", "bad": "neg"}
    rows = [f"a {word} thing number {n}\t{label}" for n in range(60) for word, label in words.items()]
    (tmp_path / "data.tsv").write_text("\n".join(["text\tlabel", *rows]), encoding="utf-8")
    small = Reviews(data=str(tmp_path / "data.tsv"), folder=str(tmp_path / "runs"), epochs=1)
    found = {}
    for name in ("fp32", "mezzo-amp"):
        session = small.build(VARIANTS[name], SETTING)
        session.warm_up()
        assert session.run().item() > 0
        assert session.own_seconds() > 0
        found[name] = session.measures()
        assert (tmp_path / "runs" / name / "curves.png").exists()
        policy = json.loads((tmp_path / "runs" / name / "result.json").read_text())["policy"]
        assert policy.split(",")[0] == {"fp32": "fp32", "mezzo-amp": "bf16"}[name]
    assert all(0 <= one["accuracy"] <= 1 and one["skipped steps"] == 0 for one in found.values())


def test_only_the_adapters_train() -> None:
    layer = LoraLinear(8, 2)
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"down.weight", "up.weight"}
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), layer.base(x))


def test_the_decoder_is_causal() -> None:
    layer = DecoderLayer(256, 704)
    x = torch.randn(2, 6, 256)
    changed = x.clone()
    changed[:, -1] += 1.0
    assert torch.equal(layer(x)[:, :-1], layer(changed)[:, :-1])
    assert not torch.equal(layer(x)[:, -1], layer(changed)[:, -1])


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Recipe(num_layers=0), "--num-layers 0: sizes and counts start at 1."),
        (Step(parameters=()), "--parameters was given without a value: write at least one, or leave it out."),
        (Lora(batches=(4, -1)), "--batches 4 -1: sizes and counts start at 1."),
        (Lora(lr=math.nan), "--lr nan: write a number from 0 on."),
        (Recipe(lr=-1.0), "--lr -1.0: write a number from 0 on."),
        (Overhead(modes=()), "--modes was given without a value: write at least one, or leave it out."),
        (Overhead(modes=("train", "evaluate")), "--modes evaluate does not exist. Did you mean 'eval'?"),
        (Inference(models=("berd",)), "--models berd does not exist. Did you mean 'bert'?"),
        (Inference(decoder_width=100), "--decoder-width 100 is not a multiple of 128, the width of a head."),
        (Inference(bert_width=100), "--bert-width 100 is not a multiple of 64, the width of a head."),
        (Gpt2(width=100), "--width 100 is not a multiple of 64, the width of a head."),
        (Vit(pixels=100), "--pixels 100 is not a multiple of --patch 16."),
        (Overhead(width=10, heads=4), "--width 10 is not a multiple of --heads 4."),
    ],
)
def test_numbers_that_measure_nothing(workload: Workload, message: str) -> None:
    with pytest.raises(BenchError) as caught:
        workload.check()
    assert str(caught.value) == message


def test_defaults_pass_their_own_check() -> None:
    for name in WORKLOADS:
        for device in ("cpu", "cuda"):
            find_workload(name).for_device(torch.device(device)).check()


def test_weights_drawn_once_and_repeated_spread_as_torchs_do() -> None:
    wide = nn.ModuleDict({"linear": nn.Linear(1024, 1200, bias=False), "norm": nn.RMSNorm(1024)})
    torch.manual_seed(0)
    draw_weights_(wide.to_empty(device="cpu"))
    drawn, torchs = wide["linear"].weight, nn.Linear(1024, 1200, bias=False).weight
    assert torch.equal(drawn.flatten()[DRAWN:], drawn.flatten()[: drawn.numel() - DRAWN])
    assert wide["norm"].weight.eq(1).all() and len(drawn[:900].unique(dim=0)) == 900
    torch.testing.assert_close(drawn.std(), torchs.std(), rtol=2e-3, atol=0)
