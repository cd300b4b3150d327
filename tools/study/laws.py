"""Laws of loss over sizes, and over sizes and tokens: fits with intervals, and whether a design of
runs can tell the exponents apart at all.

A ladder with the same tokens per parameter at all sizes is a ray: N and D grow together, and any
mixture of A / N^a and B / D^b lies on it equally well. Its one exponent belongs to neither. Sizes
times several numbers of tokens per parameter are a grid, on which both exponents can be told.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from tools.study.significance import ALPHA, t_quantile

# L = E + A / N^a + B / D^b of Hoffmann et al. 2022 (arXiv:2203.15556, appendix D.3): the point at
# which a design is judged before its runs
TYPICAL = {"A": 406.4, "a": 0.34, "B": 410.7, "b": 0.28}
# Designs above this condition number cannot tell the exponents apart: rounding and noise of the
# losses are multiplied by as much. Rays have 1e6 and more, grids of three sizes over a factor of 8
# and three ratios over a factor of 16 have about 300.
WORST = 1500.0
SEARCH = (0.02, 3.0)  # exponents
GRID = 32  # values of an exponent in a round of the search
ROUNDS = 4  # each looks closer at the exponents that may be right


def condition_of(N, D) -> float:
    """The condition number of a design: of the derivatives of the law by its five constants at the
    points (N, D), each column scaled to length 1."""
    N = np.asarray(N, float)
    D = np.asarray(D, float)
    of_size = TYPICAL["A"] * N ** -TYPICAL["a"]
    of_tokens = TYPICAL["B"] * D ** -TYPICAL["b"]
    columns = [np.ones_like(N), of_size, of_size * np.log(N), of_tokens, of_tokens * np.log(D)]
    matrix = np.stack([column / np.linalg.norm(column) for column in columns], axis=1)
    if len(set(zip(N, D))) < len(columns):
        return math.inf
    return float(np.linalg.cond(matrix))


class Law(NamedTuple):
    """L = E + A / N^a + B / D^b, with the 95 % intervals of both exponents."""

    E: float
    A: float
    a: float
    a_low: float
    a_high: float
    B: float
    b: float
    b_low: float
    b_high: float


def fit_sizes_and_tokens(N, D, losses) -> Law:
    """The least squares fit with E, A, B >= 0. For each pair of exponents the rest is a linear fit.
    The interval of an exponent (profile likelihood) holds all values that, with the best other
    exponent, fit not worse than the best by more than chance explains. An end of the search that
    still fits is 0 or inf: the data bound nothing there. N, D: six different points or more."""
    N = np.asarray(N, float)
    D = np.asarray(D, float)
    L = np.asarray(losses, float)
    dof = len(L) - 5
    sizes = np.geomspace(*SEARCH, GRID)
    tokens = sizes
    for _ in range(ROUNDS):
        errors, constants = errors_of(N / N.min(), D / D.min(), L, sizes, tokens)
        best = np.unravel_index(errors.argmin(), errors.shape)
        found = [sizes[best[0]], tokens[best[1]]]
        most = errors[best] * (1 + t_quantile(ALPHA, dof) ** 2 / dof) + 1e-18
        ends = [
            range_of_fits(sizes, errors.min(1) <= most),
            range_of_fits(tokens, errors.min(0) <= most),
        ]
        sizes = np.geomspace(*ends[0], GRID)
        tokens = np.geomspace(*ends[1], GRID)
    a, b = (float(exponent) for exponent in found)
    E, A, B = (float(value) for value in constants[best])
    a_ends = (as_bound(end) for end in ends[0])
    b_ends = (as_bound(end) for end in ends[1])
    return Law(E, A * N.min() ** a, a, *a_ends, B * D.min() ** b, b, *b_ends)


def range_of_fits(exponents: np.ndarray, inside: np.ndarray) -> tuple[float, float]:
    """The interval of the exponents that fit, as wide as one step of the search beyond them."""
    found = np.flatnonzero(inside)
    first = max(found[0] - 1, 0)
    last = min(found[-1] + 1, len(exponents) - 1)
    return float(exponents[first]), float(exponents[last])


def as_bound(exponent: float) -> float:
    """0 or inf for an end of the search."""
    if exponent <= SEARCH[0] * (1 + 1e-9):
        return 0.0
    if exponent >= SEARCH[1] * (1 - 1e-9):
        return math.inf
    return exponent


def errors_of(N, D, L, sizes, tokens) -> tuple[np.ndarray, np.ndarray]:
    """(sum of squared errors (K, K), constants E, A, B (K, K, 3)) of the best fit for each pair of
    K exponents, of `sizes` and of `tokens`. A constant that would be negative is 0: of the fits with some constants at 0, the
    best one without a negative constant counts."""
    K = len(sizes)
    of_size = N ** -sizes[:, None]  # (K, points)
    of_tokens = D ** -tokens[:, None]
    terms = np.ones((K, K, len(L), 3))
    terms[..., 1] = of_size[:, None]
    terms[..., 2] = of_tokens[None]
    squares = np.einsum("abpi,abpj->abij", terms, terms)
    products = np.einsum("abpi,p->abi", terms, L)
    errors = np.full((K, K), np.inf)
    constants = np.zeros((K, K, 3))
    for n in (1, 2, 3):
        for kept in itertools.combinations(range(3), n):
            kept = list(kept)
            # a little on the diagonal: exponents of nearly equal columns have no unique fit
            matrix = squares[..., kept, :][..., kept] + 1e-12 * np.eye(n)
            found = np.linalg.solve(matrix, products[..., kept, None])[..., 0]
            whole = np.zeros((K, K, 3))
            whole[..., kept] = found
            residuals = np.einsum("abpi,abi->abp", terms, whole) - L
            error = (residuals**2).sum(-1)
            is_better = (found >= 0).all(-1) & (error < errors)
            errors = np.where(is_better, error, errors)
            constants = np.where(is_better[..., None], whole, constants)
    return errors, constants
