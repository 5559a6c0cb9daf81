"""Triton's interpreter, faster and with products of BF16; import it after TRITON_INTERPRET is set, before any kernel.

Triton 3.7's interpreter multiplies the bit patterns of BF16 numbers (`findings/triton_interpreter_bf16_dot.sh`), and
prepares Triton's language anew in each call of a function by a kernel, which takes most of its time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

BUILDER: Any = type(interpreter.interpreter_builder)


def prepare() -> None:
    """Let BF16 factors be multiplied as FP32, and functions be called in the language that the kernel has prepared."""
    multiply = BUILDER.create_dot

    def widened(factor: Any) -> Any:
        if factor.dtype.scalar != tl.bfloat16:
            return factor
        return interpreter.TensorHandle((factor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    BUILDER.create_dot = lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest)
    # A kernel prepares `triton.language`, and functions of Triton's own `triton.language.core`, which is prepared here.
    interpreter._patch_lang(tl.standard.zeros.fn)
    function: Any = interpreter.InterpretedFunction
    function.__call__ = lambda self, *given, **named: self.rewrite()(*given, **named)


def count_bytes() -> Counter[str]:
    """Return bytes by "load" and "store" that kernels move from now on, of places that their masks let through."""
    moved: Counter[str] = Counter()
    load, store = BUILDER.create_masked_load, BUILDER.create_masked_store

    def counted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        made = load(self, pointers, mask, *rest)
        moved["load"] += int(np.count_nonzero(mask.data)) * made.data.itemsize
        return made

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        moved["store"] += int(np.count_nonzero(mask.data)) * size
        return store(self, pointers, value, mask, *rest)

    BUILDER.create_masked_load, BUILDER.create_masked_store = counted_load, counted_store
    return moved
