"""A plug-in of SGLang's for tests: it spoils one tensor of a rank, so that somebody has to notice.

Its orders are `/weights_checker`'s actions of the form "spoil RANK MODULE ATTRIBUTE WAY".
"""

import torch


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND)


def handle(original, checker, action, *args, **kwargs):
    if not action.startswith("spoil "):
        return original(checker, action, *args, **kwargs)
    _, rank, module, attribute, way = action.split()
    place = checker._parallelism_info(role=kwargs["role"])
    if place.tp_rank == int(rank):
        with torch.no_grad():
            WAYS[way](getattr(checker._get_model().get_submodule(module), attribute).data)
    return {"checksums": {}, "per_gpu_checksum": "", "parallelism_info": place.model_dump()}


def flip(tensor, index, bit):
    tensor.contiguous()
    at = tuple(index % size for size in tensor.shape)
    value = tensor[at].reshape(1).view(torch.int16) ^ (1 << bit)
    tensor[at] = value.view(tensor.dtype)[0]


WAYS = {
    "lowest_bit": lambda tensor: flip(tensor, 0, 0),
    "sign": lambda tensor: flip(tensor, 5, 15),
    "exponent": lambda tensor: flip(tensor, 3, 9),
    "last": lambda tensor: flip(tensor, -1, 0),
    "zeros": lambda tensor: tensor.zero_(),
    "rows": lambda tensor: tensor.copy_(tensor.roll(1, 0)),
    "columns": lambda tensor: tensor.copy_(tensor.roll(1, -1)),
    "scaled": lambda tensor: tensor.mul_(1 + 2**-7),
}
