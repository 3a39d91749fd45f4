"""A measured variant that the tests of comparisons share."""

from gptmini.extras.compare.variants import RunMeasurement, Variant


def variant(name: str, *bits: float) -> Variant:
    history = [(1, 1.0, 9.0), (2, 2.0, 2.0)]
    runs = [
        RunMeasurement(
            path="p",
            split="validation",
            whole=True,
            seq_len=64,
            seed=seed,
            step=900,
            loss=each,
            loss_half_width=0.1,
            bits_per_byte=each,
            bits_per_byte_half_width=0.1,
            accuracy=0.5,
            tokens_per_second=1e4,
            seconds=60.0,
            history=list(history),
        )
        for seed, each in enumerate(bits)
    ]
    return Variant(name, runs, 1000, 32_768)
