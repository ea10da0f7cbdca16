"""Choosing both thresholds of a layer by what their extra columns, or clamped values, save in rounding error."""

from __future__ import annotations

from quantkit.quantizers.flatten.slicing import (
    Limited,
    Operands,
    Split,
    extended_columns,
    most_slices,
    output_error,
    relative_error,
    split_channels,
)

# Thresholds tried, as multiples of those of Eq 7.
_ACT_STEPS = (0.5, 0.6, 0.7, 0.85, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
_WEIGHT_STEPS = (0.7, 1.0, 1.5, 2.0, 3.0, 4.0)
# And where hardly any columns are to be spent: far enough up to cut a single channel.
_FAR_ACT_STEPS = (8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0)
_FAR_WEIGHT_STEPS = (6.0, 8.0, 12.0, 16.0, 32.0)


def priced_splits(
    operands: Operands, acts: Split, weights: Split, price: float, max_extended: int, *, far: bool = False
) -> Limited | None:
    """The splits of the least square root of the output error plus ``price`` per column, K of which count as 1.

    acts, weights: the splits at the recipe's own thresholds. far: also try thresholds far above them.
    The errors of both operands are taken one at a time and added. The root lets layers of large and of small errors
    both have columns: with the error itself, one price left almost none to models whose errors are small.
    None where no pair of thresholds needs at most ``max_extended`` extra columns.
    """
    channels = operands.weight.shape[1]
    exact = operands.rows @ operands.weight.t()
    tried_acts, tried_weights = [], []
    for step in (*_ACT_STEPS, *(_FAR_ACT_STEPS if far else ())):
        split = operands.split_inputs(acts.threshold * step, acts.bits)
        error = relative_error(exact, split.dequantized(operands.rows) @ operands.weight.t())
        tried_acts.append((step, split, error))
    for step in (1.0,) if weights.by_row else (*_WEIGHT_STEPS, *(_FAR_WEIGHT_STEPS if far else ())):
        split = operands.split_weight(weights, step)
        error = relative_error(exact, operands.rows @ split.dequantized(operands.weight).t())
        tried_weights.append((step, split, error))
    best, least = None, float("inf")
    for act_step, a, act_error in tried_acts:
        for weight_step, w, weight_error in tried_weights:
            columns = extended_columns(a, w)
            cost = (act_error + weight_error) ** 0.5 + price * columns / channels
            if columns <= max_extended and cost < least:
                best, least = Limited(a, w, act_step, weight_step), cost
    return best


def split_cost(operands: Operands, acts: Split, weights: Split, price: float) -> float:
    """Root of the output error plus ``price`` per extra column, K of which count as 1; NaN without a sample."""
    columns = extended_columns(acts, weights) / operands.weight.shape[1]
    return output_error(operands, acts, weights) ** 0.5 + price * columns


# Ranges tried when values may be clamped, as shares of the input's largest value.
_KEPT = tuple(2.0 ** (-i / 4) for i in range(25))


def clipped_splits(operands: Operands, weights: Split, price: float, max_extended: int) -> tuple[Split, Split]:
    """The splits of least output error on the sample where values beyond the input's slices may be clamped.

    price: as in priced_splits.
    weights: the split at the recipe's own threshold. Tried are thresholds from the input's largest value down, the
    channels that need most slices capped within ``max_extended`` extra columns, and the weight cut or in one piece.
    Every token counts alike. That is wrong of tokens on which attention parks, which limit_columns therefore weighs by
    what they cost others; a prefix takes those away.
    """
    reach = operands.act_absmax.max().item()
    best, least = None, float("inf")
    for w in (operands.split_weight(weights, float("inf")), weights):
        for kept in _KEPT:
            a = most_slices(split_channels(operands.act_absmax, reach * kept, w.bits), w, max_extended)
            if a is None:
                continue
            cost = split_cost(operands, a, w, price)
            if cost < least:
                best, least = (a, w), cost
    return best or (split_channels(operands.act_absmax, float("inf"), weights.bits), weights)
