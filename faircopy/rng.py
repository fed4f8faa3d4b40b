"""Randomness as a function of (seed, position, ...): the same numbers in any order of asking."""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1

# What a random number is used for; two uses at one position never share bits.
CHOICE, COIN, RESIDUAL = 0, 1, 2


def mix(value: int) -> int:
    """Scramble 64 bits (the splitmix64 finaliser)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(seed: int, position: int, use: int = CHOICE, item: int = 0) -> int:
    """64 bits for one use at one position of one request."""
    return mix(mix(mix(mix(seed & _MASK) ^ position) ^ use) ^ item)


def signed(key: int) -> int:
    """The same 64 bits as a signed number, as torch's int64 has them."""
    return key - (1 << 64) if key >> 63 else key


def uniform(seed: int, position: int, use: int, item: int = 0) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (key(seed, position, use, item) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A new random seed."""
    return secrets.randbits(63)


def sample_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n samples; the first keeps the request's own."""
    return seed if index == 0 else mix(seed ^ mix(index)) >> 1
