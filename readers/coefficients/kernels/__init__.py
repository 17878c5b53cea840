"""What is compiled on the user's machine, by numba: everything that is done for every coefficient or pixel.

These modules hold functions of numbers and addresses alone; `readers.coefficients.compiled` loads them, and nothing
else may. They use AVX2 and BMI2 instructions by name, so a CPU without these must not get here.
"""

from __future__ import annotations

from cache.errors import MissingExtraError

try:
    import numba  # noqa: F401
except ImportError as error:
    raise MissingExtraError("numba", "coefficients", "decoding JPEGs by compiled functions") from error

__all__: list[str] = []
