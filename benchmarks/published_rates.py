"""Hit rates of the published conversation rounds: `python -m benchmarks.published_rates --json FILE`.

The publication gives each rate with three digits. The exact ones follow from the lengths of the rounds; where the
fourth digit is a 5, the published one is cut, not rounded: .937 and .812 are 0.9375 and 0.8125.
"""

from __future__ import annotations

from benchmarks.figures import Figures, option_parser
from benchmarks.multiturn import run_both_ways, total_hit_rate

PUBLISHED = {
    "output kept": ((0, 0.750, 0.857, 0.900, 0.923, 0.937), 0.882),
    "not kept": ((0, 0.250, 0.571, 0.700, 0.769, 0.812), 0.686),
}


def main() -> None:
    """Serve the rounds and compare their rates."""
    parser = option_parser(__doc__)
    chosen = parser.parse_args()
    with Figures(chosen.json) as figures:
        apart, told = 0.0, []
        for name, rounds in run_both_ways().items():
            rates, total = PUBLISHED[name]
            pairs = [*zip([hits.hit_rate for hits in rounds], rates, strict=True), (total_hit_rate(rounds), total)]
            apart = max(apart, *(abs(ours - theirs) for ours, theirs in pairs))
            told.append(f"{name}: " + " ".join(f"{ours:.4f}" for ours, _ in pairs))
        figures.add("multiturn.apart", apart, "; ".join(told))


if __name__ == "__main__":
    main()
