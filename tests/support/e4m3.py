"""An independent reference of FP8: E4M3 by the definition of its 256 codes, blocks by loops."""

from __future__ import annotations

import math

import numpy as np


def e4m3_value(code):
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 0xF, code & 0x7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


MAGNITUDES = np.array([e4m3_value(code) for code in range(0x7F)])


def nearest_code(value):
    """Return the code of the nearest number, of two equally near ones the even code; the sign is kept."""
    magnitude = min(abs(float(value)), 448.0)
    distance = np.abs(MAGNITUDES - magnitude)
    candidates = np.flatnonzero(distance == distance.min())
    code = next((c for c in candidates if c % 2 == 0), candidates[0])
    return int(code) | (0x80 if math.copysign(1.0, value) < 0 else 0)


def reference_block(weight, block):
    weight = weight.float().numpy()
    rows, columns = (math.ceil(n / block) for n in weight.shape)
    codes, scale = np.zeros(weight.shape, np.uint8), np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            where = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            amax = np.abs(weight[where]).max()
            step = max(np.float32(amax) / np.float32(448), np.float32(2.0**-126)) if amax else np.float32(1)
            scale[i, j] = step
            scaled = weight[where] / step
            codes[where] = np.vectorize(nearest_code, otypes=[np.uint8])(scaled)
    return codes, scale


def reference_codes(quotients):
    """Return what `nearest_code` does for many FP32 numbers: a code ends where the middle to the next one is."""
    middles = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
    magnitude = np.minimum(np.abs(quotients.astype(np.float64)), 448.0)
    below, above = np.searchsorted(middles, magnitude, side="left"), np.searchsorted(middles, magnitude, side="right")
    codes = np.where(below % 2 == 0, below, above)  # on a middle they differ: the even one
    return (codes | np.where(np.signbit(quotients), 0x80, 0)).astype(np.uint8)
