"""Draw the figure of the idea: class counts, and the accuracy of each class with and without correction for the prior.

    python recipes/paper/idea.py --features FOLDER    # trains the head, writes recipes/results/idea.json
    python recipes/paper/idea.py                      # draws docs/figures/idea.svg from that file

One linear head is trained by plain cross-entropy on CIFAR-100-LT (frozen EfficientNet-Lite0, 128 pixels). It is
decided by its largest logit, and under the uniform prior, which is what Balanced Softmax and logit adjustment do.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
RESULTS, FIGURE = ROOT / "recipes/results/idea.json", ROOT / "docs/figures/idea.svg"
WIDTH, HEIGHT, LEFT, BIN = 720, 356, 58, 5
TOP, MIDDLE, BASE = 46, 128, 326  # of the counts, between both parts, of the accuracies
HEAD = 72  # of the title and the legend of the accuracies
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px } .counts { fill: #8c959f }
.plain { fill: #d55e00 } .balanced { fill: #0072b2 } line { stroke: #8c959f; stroke-width: .6 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .counts { fill: #6e7681 } .plain { fill: #e69f00 } .balanced { fill: #56b4e9 }
}
@media (max-width: 480px) { text { font-size: 23px } .small { font-size: 20px } }"""


def measure(cache: Path) -> dict:
    """Train the head and return counts and accuracies by class, the most frequent first."""
    sys.path.insert(0, str(ROOT / "recipes/benchmarks"))
    from frozen_features import load_features

    from livt_hf.metrics import long_tail_metrics
    from livt_hf.training.exact_head import fit_exact_head

    data = load_features("cifar100-lt", cache)
    counts = np.bincount(data.train_labels)
    head = fit_exact_head(data.train, data.train_labels, loss="ce")
    logits = torch.from_numpy(data.test) @ head.weight.T + head.bias
    rules = {"plain": logits, "balanced": logits - torch.from_numpy(counts / counts.sum()).log()}
    labels, order = torch.from_numpy(data.test_labels), np.argsort(-counts, kind="stable")
    result: dict = {"class_counts": counts[order].tolist()}
    for name, scores in rules.items():
        hits = (scores.argmax(-1) == labels).numpy()
        by_class = np.bincount(data.test_labels, hits) / np.bincount(data.test_labels)
        summary = {k: v for k, v in long_tail_metrics(scores, labels, counts).items() if k in KEPT}
        result[name] = {"by_class": by_class[order].round(4).tolist()} | summary
    return result


KEPT = ("accuracy", "many", "medium", "few")


def draw(result: dict) -> str:
    """Return the figure as SVG, readable on a light and on a dark page."""
    counts, plain, balanced = result["class_counts"], result["plain"], result["balanced"]
    step = (WIDTH - LEFT - 12) / len(counts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{describe(result)}"><style>{STYLE}</style>',
        f'<text x="{LEFT}" y="20">Training images of the {len(counts)} classes: '
        f"{counts[0]} down to {counts[-1]}</text>",
        f'<text x="{LEFT}" y="{MIDDLE + 32}">Test accuracy, mean of every {BIN} classes</text>',
        f'<text x="{LEFT}" y="{MIDDLE + 56}" style="font-weight:600">'
        f'<tspan class="plain">cross-entropy {100 * plain["accuracy"]:.1f} %</tspan>'
        f'<tspan class="balanced" dx="16">corrected for the prior {100 * balanced["accuracy"]:.1f} %</tspan></text>',
    ]
    for number, count in enumerate(counts):
        height = count / counts[0] * (MIDDLE - TOP)
        x, y = LEFT + number * step, MIDDLE - height
        parts.append(f'<rect class="counts" x="{x:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{height:.1f}"/>')
    scale = (BASE - MIDDLE - HEAD) / 0.9
    for share in (0, 0.4, 0.8):
        y = BASE - share * scale
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
        )
    for first in range(0, len(counts), BIN):
        for offset, (name, values) in enumerate((("plain", plain), ("balanced", balanced))):
            height = scale * float(np.mean(values["by_class"][first : first + BIN]))
            x = LEFT + first * step + offset * BIN * step * 0.45
            parts.append(
                f'<rect class="{name}" x="{x:.1f}" y="{BASE - height:.1f}" width="{BIN * step * 0.4:.1f}" '
                f'height="{height:.1f}"/>'
            )
    parts.append(f'<text class="small" x="{LEFT}" y="{BASE + 21}">frequent classes</text>')
    parts.append(f'<text class="small" x="{WIDTH - 12}" y="{BASE + 21}" text-anchor="end">rare classes</text></svg>')
    return "\n".join(parts) + "\n"


def describe(result: dict) -> str:
    """Return what the figure shows in one sentence."""
    few = [f"{100 * result[name]['few']:.1f}" for name in ("plain", "balanced")]
    return f"Corrected for the class prior, classes of fewer than 20 images go from {few[0]} to {few[1]} % accuracy."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--features", type=Path, help="folder of cached features; without it the recorded file is drawn"
    )
    options = parser.parse_args()
    if options.features:
        RESULTS.write_text(json.dumps(measure(options.features)) + "\n")
    result = json.loads(RESULTS.read_text())
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(draw(result))
    print(FIGURE, describe(result))


if __name__ == "__main__":
    main()
