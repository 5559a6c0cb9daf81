"""The only door to Megatron Core.

What Megatron and torch.distributed warn of here is about themselves (no Transformer Engine on a laptop, names that will
change); on a terminal it would bury what we say.
"""

import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed)\.")
