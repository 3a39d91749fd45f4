"""Makes the seeds of all that is random in training: hashes of where a random number is used."""

import hashlib


def seed_from(*numbers: int) -> int:
    """Hash integers to a seed in [0, 2⁶³).

    For example, `seed_from(seed, step, micro_batch)` seeds the dropout of a micro-batch.
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
