"""Peak memory of the recipe by width, beside fp32: from which size on mixed precision lowers it on this machine.

Run: `python benchmarks/memory_by_size.py [WIDTH ...]`. Each way runs in a process of its own, as `mezzo bench recipe` runs it; it
prints a Markdown table: megabytes above the process's baseline after import, the ratio to fp32 behind. The last column is what the
tensors alone come to under bf16-master over fp32: weight, remainder and gradient 2 bytes each instead of weight and gradient 4,
and activations of 2 bytes instead of 4.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

from mezzo.bench import Plan, Recipe, measure

WIDTHS = (128, 256, 512, 1024, 2048)
WAYS = ("fp32", "torch-autocast", "prepare", "prepare-master")


def least_ratio(recipe: Recipe) -> float:
    """Return the bytes of weights, gradients and activations under bf16-master over those in fp32."""
    weights = sum(a * b + b for a, b in pairwise(recipe.sizes))
    activations = recipe.batch_size * sum(recipe.sizes)
    return (6 * weights + 2 * activations) / (8 * weights + 4 * activations)


def line(width: int) -> str:
    """Return the line of one width, measured."""
    recipe = Recipe(in_size=width, out_size=width, num_batches=2, epochs=2)
    found = measure(recipe, Plan(variants=WAYS, rounds=2, peak_rates_s=0.1))
    peaks = {m.variant: m.peak_bytes for m in found.measurements}
    rest = [f"{peaks[way] / 1e6:.1f} ({peaks[way] / peaks['fp32']:.2f}x)" for way in WAYS[1:]]
    return f"| {width} | {peaks['fp32'] / 1e6:.1f} | {' | '.join(rest)} | {least_ratio(recipe):.2f}x |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("widths", nargs="*", type=int, default=WIDTHS)
    widths = parser.parse_args().widths
    print("| width | fp32, MB | torch.autocast | prepare bf16 | prepare bf16-master | tensors alone |")
    print("|---:|---:|---:|---:|---:|---:|")
    for width in widths:
        print(line(width), flush=True)


if __name__ == "__main__":
    main()
