"""Encodes the change of an array of items as a record, in the smallest of several forms, and applies such records.

    sparse steps   positions of the items that changed, and the step of each as an integer
    dense steps    the step of every item, in symbols of 2, 4 or 8 bits
    step planes    the step of every item, as byte planes
    split          first the items whose magnitude is below a bound, then the others: weights near zero change far more
                   often than large ones, since they are stored more finely

Steps are small if values move to a neighbour: the bf16 cast of an fp32 master weight moves one unit, if at all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from echo2.weights.format.planes import (
    BLOCK_ITEMS,
    Items,
    Reader,
    Writer,
    read_item_planes,
    read_positions,
    read_steps,
    require,
    unzigzag,
    where,
    write_item_planes,
    write_positions,
    write_steps,
    zigzag,
)

SPARSE_STEPS, DENSE_STEPS, STEP_PLANES, SPLIT = range(4)
STEP_BITS = (2, 4, 8)

SPARSE_BELOW = 0.05  # share of changed items below which only the sparse form is tried
SPARSE_UP_TO = 0.45  # share above which the sparse form is not tried: gaps would be shorter than a Huffman symbol
WORTH_WAITING = 1.02  # a slower form must be smaller by this factor
SAMPLE_ITEMS = 1 << 15  # items that are sampled to choose a form
TRIAL_ITEMS = 1 << 14  # items on which forms are tried
TRIAL_STEPS = 1 << 12  # steps on which numbers of bits are tried for the sparse form
SAMPLE_RUN = 1 << 10

SPLIT_FROM = 1 << 14  # arrays with fewer items are not split
SPLIT_UP_TO = 0.2  # largest share of the items that is split off
SPLIT_COSTS = 0.125  # bits that a split must save for each item that it gathers and scatters
# Share of the items' bytes that a split must save: below it, 100 Mbit/s send them before four cores make the split.
SPLIT_SAVES = 1 / 256
MAX_SPLITS = 4


def encode_items(base: Items, target: Items, splits: int = MAX_SPLITS) -> bytes:
    """Return the record that turns `base` into `target`, each [num_items]. It may be longer than `target` itself."""
    sample = _sample(base.size, SAMPLE_ITEMS)
    base_sample, target_sample = _take(base, sample), _take(target, sample)
    bound = _bound(base_sample, base_sample != target_sample) if splits else 0
    out = Writer()
    if bound:
        low = where(_is_low(base, bound))
        out.byte(SPLIT)
        out.byte(bound)
        out.raw(encode_items(base[low], target[low], splits=splits - 1))
        target_sample = np.where(_is_low(base_sample, bound), base_sample, target_sample)
    changed = float(np.mean(base_sample != target_sample)) if base_sample.size else 0.0
    form, bits = SPARSE_STEPS, 0
    if changed >= SPARSE_BELOW:
        trial = _sample(base_sample.size, TRIAL_ITEMS)
        form, bits = _smallest_form(_take(base_sample, trial), _take(target_sample, trial), changed)
    if form == SPARSE_STEPS:
        out.raw(_sparse(base, target, bound))
    else:
        others = np.where(_is_low(base, bound), base, target) if bound else target
        out.raw(_dense(form, bits, base, others))
    return out.record()


def _magnitudes(items: Items) -> Items:
    """Return the items without their sign bit, shifted up by one bit: integers that order floats by magnitude."""
    return items << 1


def _is_low(items: Items, bound: int) -> NDArray[np.bool_]:
    low = np.empty(items.size, np.bool_)
    limit = items.dtype.type(bound << (8 * items.itemsize - 8))
    for part in _blocks(items.size):
        np.less(_magnitudes(items[part]), limit, out=low[part])
    return low


def _exponents(items: Items) -> NDArray[np.uint8]:
    return (_magnitudes(items) >> (8 * items.itemsize - 8)).astype(np.uint8)


def _bound(base: Items, is_changed: NDArray[np.bool_]) -> int:
    """Return the exponent below which items are best coded separately; 0 if that saves too little.

    Only the entropy of positions counts. Items that are split off count with the entropy given their exponent, since
    they may be split again; the others keep their positions among all items.
    """
    if base.size < SPLIT_FROM:
        return 0
    exponents = _exponents(base)
    items = np.bincount(exponents, minlength=256).astype(np.float64)
    changed = np.bincount(exponents[is_changed], minlength=256).astype(np.float64)
    items_below = np.concatenate([[0.0], np.cumsum(items)[:-1]])
    changed_below = np.concatenate([[0.0], np.cumsum(changed)[:-1]])
    bits_below = np.concatenate([[0.0], np.cumsum(_position_bits(changed, items))[:-1]])
    bits = bits_below + _position_bits(changed.sum() - changed_below, np.full(256, items.sum()))
    bits += SPLIT_COSTS * items_below
    bits[items_below > SPLIT_UP_TO * base.size] = np.inf
    best = int(np.argmin(bits))
    return best if bits[0] - bits[best] >= 8 * SPLIT_SAVES * base.nbytes else 0


def _position_bits(changed: NDArray[np.float64], items: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy, in bits, of the positions of `changed` changed items among `items`."""
    share = np.clip(changed / np.maximum(items, 1), 1e-9, 1 - 1e-9)
    return -items * (share * np.log2(share) + (1 - share) * np.log2(1 - share))


def apply_items(reader: Reader, items: Items, splits: int = MAX_SPLITS) -> None:
    """Turn `items`, which hold the base, into the target, in place. A corrupt record may be applied in part.

    Raises:
        PeerError: "corrupt", when the record is not valid for these items.
    """
    form = reader.byte()
    if form == SPLIT:
        require(splits > 0, f"more than {MAX_SPLITS} splits")
        low = where(_is_low(items, reader.byte()))
        items_low = items[low]
        apply_items(reader, items_low, splits - 1)
        apply_items(reader, items, 0)
        items[low] = items_low
        return
    if form in (SPARSE_STEPS, DENSE_STEPS):
        is_sparse = form == SPARSE_STEPS
        count = reader.number(items.size) if is_sparse else items.size
        positions = read_positions(reader, count, items.size) if is_sparse else None

        def add(start: int, steps: Items) -> None:
            part = slice(start, start + steps.size)
            items[part if positions is None else positions[part]] += steps

        bits = reader.byte()
        require(bits in STEP_BITS, f"symbols of {bits} bits")
        read_steps(reader, bits, count, items.itemsize, add)
    else:
        require(form == STEP_PLANES, f"a record of form {form}")
        planes = read_item_planes(reader, items.size, items.itemsize)
        for part in _blocks(items.size):
            items[part] += unzigzag(planes[part])


def _sparse(base: Items, target: Items, bound: int = 0) -> bytes:
    """Encode the positions and steps of the items that differ and are not below `bound`."""
    differs = np.empty(base.size, np.bool_)
    for part in _blocks(base.size):
        np.not_equal(base[part], target[part], out=differs[part])
    positions = where(differs)
    before = base[positions]
    if bound:
        is_kept = _exponents(before) >= bound
        positions, before = positions[is_kept], before[is_kept]
    steps = target[positions] - before
    trial = _take(steps, _sample(steps.size, TRIAL_STEPS))
    records = {bits: _steps(trial, bits) for bits in STEP_BITS}
    bits = min(records, key=lambda bits: len(records[bits]))
    out = Writer()
    out.byte(SPARSE_STEPS)
    out.number(positions.size)
    write_positions(out, positions, base.size)
    out.byte(bits)
    out.raw(_steps(steps, bits))
    return out.record()


def _dense(form: int, bits: int, base: Items, target: Items) -> bytes:
    out = Writer()
    out.byte(form)
    if form == DENSE_STEPS:
        out.byte(bits)
        write_steps(out, bits, base.size, lambda start, stop: target[start:stop] - base[start:stop])
        return out.record()
    steps = np.empty_like(target)
    for part in _blocks(base.size):
        steps[part] = zigzag(target[part] - base[part])
    write_item_planes(out, steps)
    return out.record()


def _smallest_form(base: Items, target: Items, changed: float) -> tuple[int, int]:
    """Return the (form, bits per symbol) that is smallest on this sample; among about equal sizes, the fastest."""
    forms = [(STEP_PLANES, 0), *((DENSE_STEPS, bits) for bits in STEP_BITS)]
    sizes = {form: len(_dense(*form, base, target)) for form in forms}
    if changed <= SPARSE_UP_TO:
        sizes[SPARSE_STEPS, 0] = len(_sparse(base, target))
    limit = WORTH_WAITING * min(sizes.values())
    return next(form for form, size in sizes.items() if size <= limit)


def _steps(steps: Items, bits: int) -> bytes:
    out = Writer()
    write_steps(out, bits, steps.size, lambda start, stop: steps[start:stop])
    return out.record()


def _sample(num_items: int, aim: int) -> list[slice]:
    """Return runs spread evenly over the items, with about `aim` items in all; everything if there are fewer."""
    if num_items <= aim:
        return [slice(0, num_items)]
    runs = aim // SAMPLE_RUN
    return [slice(start, start + SAMPLE_RUN) for start in range(0, num_items - SAMPLE_RUN + 1, num_items // runs)]


def _take(items: Items, parts: list[slice]) -> Items:
    return np.concatenate([items[part] for part in parts])


def _blocks(num_items: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK_ITEMS) for start in range(0, num_items, BLOCK_ITEMS))
