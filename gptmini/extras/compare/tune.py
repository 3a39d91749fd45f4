"""Which learning rates to try for a variant, as multiples of the planned ones.

Half, once and twice; then on, while the best is at an end. Loads no torch.
"""

from gptmini.config.settings import Config

FIRST_RATES = (1.0, 0.5, 2.0)
FURTHEST_RATE = 8.0  # two doublings beyond the first; 1/8 on the other side
KEYS = ("lr", "embed_lr", "muon_lr", "min_lr")

Tried = dict[float, float]  # bits per byte by multiple of the planned rates


def choose_next_rate(tried: Tried) -> float | None:
    """Choose the multiple to try next; None when the best lies inside, or at the furthest."""
    for rate in FIRST_RATES:
        if rate not in tried:
            return rate
    best = find_best_rate(tried)
    further = {min(tried): best / 2, max(tried): best * 2}.get(best)
    if further is None or not 1 / FURTHEST_RATE <= further <= FURTHEST_RATE:
        return None
    return further


def find_best_rate(tried: Tried) -> float:
    """Find the multiple with the fewest bits per byte, of equals the least."""
    return min(sorted(tried), key=tried.__getitem__)


def multiply_rates(config: Config, planned: Config, rate: float) -> Config:
    """State a multiple of the rates in `planned`, a run's settled configuration, in `config`."""
    rates = {key: getattr(planned.train, key) for key in KEYS}
    return config.with_train(**{key: rate * value for key, value in rates.items() if value})
