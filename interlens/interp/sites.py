"""Site names and addresses, and the modules they stand for.

`resid_post.12` is the output of decoder layer 12; layers count from 0, negative ones from the end, and are
never `hidden_states` indices: layer -1 is the last block's output, before the final norm.
"""

import re
from typing import Any

from interlens.errors import nearest

SITES = {"resid_pre": "input of a decoder layer", "resid_post": "output of a decoder layer"}


def parse(address: str, layers: tuple[int, ...] | None) -> list[tuple[str, int | None]]:
    """Split `resid_post.12` or `resid_post` into (site, layer); `None` stands for every layer."""
    site, dot, layer = address.partition(".")
    if site not in SITES:
        raise ValueError(f"site {site!r} cannot be captured; {nearest(site, SITES)}")
    if not dot:
        return [(site, None)] if layers is None else [(site, n) for n in layers]
    if layers is not None:
        raise ValueError(
            f"{address!r} names a layer, and layers={list(layers)} was given too; leave one of them out"
        )
    if not re.fullmatch("-?[0-9]+", layer):
        raise ValueError(f"a site's address ends in a layer number, as resid_post.12; got {address!r}")
    return [(site, int(layer))]


def absolute(site: str, layer: int, n_layers: int) -> int:
    """Turn a negative layer into its number; refuse one that is not there."""
    if not -n_layers <= layer < n_layers:
        raise ValueError(
            f'site "{site}.{layer}" is not in this model: it has {n_layers} layers (0-{n_layers - 1})'
        )
    return layer % n_layers


def decoder_layers(model: Any) -> Any:
    """The `ModuleList` of decoder blocks: the outermost one as long as the config says."""
    import torch

    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == wanted and "expert" not in name:
            return module
    raise ValueError(f"no list of {wanted} decoder layers was found in {type(model).__name__}")
