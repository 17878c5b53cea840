"""A double of the random parameters."""

import rocal_pybind as b


def coin_flip(*, probability=0.5):
    return b.createIntRand([0, 1], [1 - probability, probability])
