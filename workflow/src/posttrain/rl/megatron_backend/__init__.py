"""The only package that imports Megatron Core.

It silences warnings of Megatron and torch.distributed about themselves (Transformer Engine missing on a laptop,
deprecated names), which would bury our own messages.
"""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")

from megatron.core.safe_globals import safe_load_from_bytes  # noqa: E402  behind the filters

# Megatron replaces torch's storage reader with its own function; both read only tensors. Restore torch's name, because
# engines accept pickled tensors only under it.
safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"
