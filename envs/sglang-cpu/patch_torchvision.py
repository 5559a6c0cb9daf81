"""Let a CUDA build of torchvision be imported beside a CPU build of torch.

Obstacle: SGLang imports torchvision unconditionally (model configs with images), and PyPI carries
CUDA builds only. Their compiled library does not load beside a CPU torch; torchvision tolerates
that everywhere but in `_meta_registrations.py`, which describes two operators that the library
would have defined: "operator torchvision::nms does not exist".

The patch declares those two operators, without an implementation, when the library is absent.

Usage: python patch_torchvision.py   (with the interpreter of the environment to patch)
"""

import importlib.metadata
import pathlib

ANCHOR = "import torchvision.extension  # noqa: F401\n"
DECLARATIONS = """
if not torchvision.extension._has_ops():  # added by posttrain: declared, not implemented
    _absent_ops = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _absent_ops.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def patch_torchvision() -> None:
    """Patch the installed torchvision in place; a second call changes nothing.

    Raises:
        RuntimeError: The installed torchvision is not the one this patch was written for.
    """
    version = importlib.metadata.version("torchvision")
    located = importlib.metadata.distribution("torchvision").locate_file("torchvision/_meta_registrations.py")
    path = pathlib.Path(str(located))
    source = path.read_text()
    if DECLARATIONS in source:
        return
    if source.count(ANCHOR) != 1:
        raise RuntimeError(f"torchvision {version}: {path} does not hold {ANCHOR!r} exactly once")
    path.write_text(source.replace(ANCHOR, ANCHOR + DECLARATIONS))


if __name__ == "__main__":
    patch_torchvision()
