"""The only door to Megatron Core.

What Megatron and torch.distributed warn of here is about themselves (no Transformer Engine on a laptop, names that will
change); on a terminal it would bury what we say.
"""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")

from megatron.core.safe_globals import safe_load_from_bytes  # noqa: E402  behind the filters

# Megatron puts a function of its own in the place of torch's reader of storages; both read tensors only. Under torch's
# name a pickled tensor is what engines allow.
safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = "torch.storage", "_load_from_bytes"
