"""Every variant trains the same model: equal bits where the arithmetic is the same."""

from __future__ import annotations

import pytest
import torch
from tests.tolerance import relative

from mezzo.bench.training import Training, policy_of, region_of, scaler_of, training_step
from mezzo.bench.variant import VARIANTS, Variant
from mezzo.bench.workload import Setting
from mezzo.bench.workloads.recipe import Recipe, make_model, mean_squared_error

RECIPE = Recipe(batch_size=16, in_size=32, out_size=8, num_layers=3, num_batches=3, epochs=2, lr=0.1)


def losses(variant: Variant, dtype: torch.dtype = torch.bfloat16, max_norm: float | None = None) -> list[float]:
    torch.manual_seed(0)
    setting = Setting(device=torch.device("cpu"), dtype=dtype)
    model = make_model(32, 8, 3)
    training = Training(optimizer="SGD", lr=0.1, max_norm=max_norm)
    step = training_step(variant, setting, model, mean_squared_error, training)
    return [step((torch.randn(16, 32), torch.randn(16, 8))).item() for _ in range(6)]


@pytest.mark.parametrize("region", ["torch", "mezzo"])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_switched_off_is_fp32_bit_for_bit(region: str, max_norm: float | None) -> None:
    off = Variant(name="off", region=region, scaler=region, enabled=False)
    assert losses(off, max_norm=max_norm) == losses(VARIANTS["fp32"], max_norm=max_norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_mezzos_drop_in_is_torchs_bit_for_bit(dtype: torch.dtype, max_norm: float | None) -> None:
    torchs, mezzos = (losses(VARIANTS[f"{maker}-amp"], dtype, max_norm) for maker in ("torch", "mezzo"))
    assert mezzos == torchs
    assert losses(VARIANTS["mezzo-autocast"], dtype, max_norm) == losses(VARIANTS["torch-autocast"], dtype, max_norm)
    assert torchs != losses(VARIANTS["fp32"], max_norm=max_norm)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, v in VARIANTS.items()
        if not (v.policy or v.keeps or v.wrapper != "none" or v.optimizer != "torch")
    ],
)
def test_a_variant_is_what_its_name_says(name: str) -> None:
    variant, setting = VARIANTS[name], Setting(device=torch.device("cpu"), dtype=torch.bfloat16)
    scaler = scaler_of(variant, setting)
    with region_of(variant, setting)():
        assert torch.is_autocast_enabled("cpu") == any(word in name for word in ("autocast", "amp", "persistent"))
    assert (scaler is not None) == ("amp" in name)
    assert (variant.cache == "persistent") == ("persistent" in name)
    if scaler is not None:
        assert type(scaler).__module__.partition(".")[0] == name.partition("-")[0]
    plain, *also = name.split("+")
    assert (variant.compiled, variant.keeps) == ("compile" in also, "keep" in also)
    assert variant.number_format(torch.bfloat16) == (plain if plain in ("fp32", "tf32") else "bf16")


@pytest.mark.parametrize("name", ["prepare", "prepare-master"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_prepared_starts_where_autocast_does_and_goes_its_way(
    name: str, dtype: torch.dtype, max_norm: float | None
) -> None:
    prepared = losses(VARIANTS[name], dtype, max_norm)
    torchs = losses(VARIANTS["torch-amp"], dtype, max_norm)
    assert prepared[0] == torchs[0]
    # Each later loss differs by gradients rounded to 16 bit once: 8 outputs of 32 products, 3 layers.
    assert prepared == pytest.approx(torchs, rel=relative(dtype, terms=32))
    assert prepared != losses(VARIANTS["fp32"], max_norm=max_norm)


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_other_libraries_train_the_same_model(name: str) -> None:
    missing = VARIANTS[name].why_not_here(torch.device("cpu"))
    if missing:
        pytest.skip(missing)
    assert losses(VARIANTS[name], max_norm=0.1) == losses(VARIANTS["torch-autocast"], max_norm=0.1)


def test_a_variant_names_its_policy() -> None:
    low = Setting(device=torch.device("cpu"), dtype=torch.float16)
    assert [policy_of(VARIANTS[name], low) for name in ("prepare", "prepare-master+keep")] == ["fp16", "fp16-master"]


def test_rivals_are_mixed_precision_by_others() -> None:
    assert {name for name, v in VARIANTS.items() if v.is_rival and "+" not in name} == {
        "torch-autocast", "torch-amp", "accelerate", "fabric", "flashoptim", "torchao",
    }  # fmt: skip


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # torchao compiles its step
@pytest.mark.parametrize("name", ["flashoptim", "torchao"])
def test_optimizers_of_others_train_16_bit_weights(name: str) -> None:
    device = torch.device("cuda" if name == "flashoptim" and torch.cuda.is_available() else "cpu")
    if missing := VARIANTS[name].why_not_here(device):
        pytest.skip(missing)
    model = make_model(32, 8, 3).to(device)
    setting, training = Setting(device=device, dtype=torch.bfloat16), Training(optimizer="AdamW", lr=0.1)
    step = training_step(VARIANTS[name], setting, model, mean_squared_error, training)
    batch = (torch.randn(16, 32, device=device), torch.randn(16, 8, device=device))
    losses = [step(batch).item() for _ in range(8)]
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# Dynamo, tracing a function mode around a compiled model, reads .grad of the model's intermediate tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "name",
    [n for n, v in VARIANTS.items() if v.compiled and not (v.tf32 or v.pure or v.keeps or v.optimizer != "torch")],
)
def test_compiled_variants_train_the_same_model(name: str) -> None:
    eager, compiled = losses(VARIANTS[name.removesuffix("+compile")]), losses(VARIANTS[name])
    assert compiled == pytest.approx(eager, rel=relative(torch.bfloat16, terms=32))


def test_clipping_sees_true_gradients() -> None:
    clipped = losses(VARIANTS["torch-amp"], max_norm=0.1)
    assert clipped == losses(VARIANTS["torch-autocast"], max_norm=0.1)
    assert clipped != losses(VARIANTS["torch-amp"])
    assert losses(VARIANTS["prepare-master"], max_norm=0.1) != losses(VARIANTS["prepare-master"])


def test_a_session_counts_its_steps() -> None:
    session = RECIPE.build(VARIANTS["fp32"], Setting(device=torch.device("cpu"), dtype=torch.bfloat16))
    assert session.units == 6
    assert session.data_bytes == 3 * 16 * (32 + 8) * 4
    assert session.measures() == {}


@pytest.mark.parametrize("layers", [1, 3])
def test_the_network_is_that_of_the_recipe(layers: int) -> None:
    kinds = [type(module).__name__ for module in make_model(8, 3, layers)]
    assert kinds == ["Linear", "ReLU"] * (layers - 1) + ["Linear"]
    assert make_model(8, 3, layers)(torch.ones(2, 8)).shape == (2, 3)


def test_what_a_variant_cannot_do() -> None:
    assert VARIANTS["torchao"].why_no_training("SGD") == "it has no SGD here; leave it out"
    assert VARIANTS["torchao"].why_no_inference and not VARIANTS["torchao"].why_no_training("AdamW")
    assert VARIANTS["torch-16bit"].why_no_training("AdamW") and not VARIANTS["torch-16bit"].why_no_inference
