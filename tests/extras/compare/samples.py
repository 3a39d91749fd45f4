"""A measured variant that the tests of comparisons share."""

from gptmini.extras.compare.variants import RunMeasurement, Variant


def variant(name: str, *bits: float) -> Variant:
    history = [(1, 1.0, 9.0), (2, 2.0, 2.0)]
    runs = [
        RunMeasurement(
            path="p",
            text="t",
            split="validation",
            seq_len=64,
            stride=64,
            seed=seed,
            step=9,
            loss=each,
            loss_half_width=0.1,
            bits_per_byte=each,
            bits_per_byte_half_width=0.1,
            accuracy=0.5,
            tokens_per_second=1e4,
            seconds=60.0,
            peak_memory=2**28,
            history=list(history),
        )
        for seed, each in enumerate(bits)
    ]
    speeds = {16: [900.0], 32: [800.0], 64: [690.0, 700.0, 720.0]}
    return Variant(name, runs, 1000, 64, 512, 32_768, speeds)
