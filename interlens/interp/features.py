"""Features of sparse autoencoders, read from a folder as SAELens writes it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlens.errors import StoreError
from interlens.interp.directions import Direction

if TYPE_CHECKING:
    import torch

_HOOKS = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "attn.hook_z": "z",
    "mlp.hook_post": "mlp_act",
}
"""TransformerLens's names of the sites that autoencoders are trained on."""
_KINDS = ("standard", "jumprelu", "topk")


@dataclass(frozen=True, eq=False)
class Features:
    """A sparse autoencoder: activations `[…, d]` to features `[…, n]` and back."""

    encoder: "torch.Tensor"
    """`[d, n]`."""
    decoder: "torch.Tensor"
    """`[n, d]`."""
    encoder_bias: "torch.Tensor"
    decoder_bias: "torch.Tensor"
    kind: str = "standard"
    threshold: "torch.Tensor | None" = None
    """Of `jumprelu`, `[n]`: what a feature must exceed to be on."""
    k: int | None = None
    """Of `topk`: how many features are on."""
    centred: bool = False
    """Whether the decoder's bias is taken off the input."""
    site: str = "resid_post"
    layer: int | None = None

    @classmethod
    def load(cls, folder: str | Path) -> "Features":
        """Read a folder of SAELens; what would change the numbers and is not known here is refused."""
        from safetensors.torch import load_file

        place = Path(folder)
        try:
            config = json.loads((place / "cfg.json").read_text(encoding="utf-8"))
            tensors = load_file(str(place / "sae_weights.safetensors"))
        except FileNotFoundError as error:
            raise StoreError(
                f"{folder} is no SAELens folder: {Path(str(error.filename)).name} is missing"
            ) from None
        kind = config.get("architecture", "standard")
        if kind not in _KINDS:
            raise StoreError(f"the autoencoder in {folder} is {kind!r}; {', '.join(_KINDS)} can be read")
        scaling = config.get("normalize_activations", "none")
        if scaling not in (None, "none"):
            raise StoreError(f"the autoencoder in {folder} wants activations scaled ({scaling!r})")
        for name in ("finetuning_scaling_factor", "rescale_acts_by_decoder_norm"):
            if config.get(name):
                raise StoreError(f"the autoencoder in {folder} sets {name}, which is not known here")
        if config.get("activation_fn", config.get("activation_fn_str", "relu")) not in ("relu", "topk"):
            raise StoreError(f"the autoencoder in {folder} has another activation function than ReLU")
        if "apply_b_dec_to_input" not in config:
            raise StoreError(f"{folder} does not say whether its bias is taken off the input")
        site, layer = _site_of(config, place)
        found = {name: tensor.float() for name, tensor in tensors.items()}
        return cls(
            encoder=found["W_enc"],
            decoder=found["W_dec"],
            encoder_bias=found["b_enc"],
            decoder_bias=found["b_dec"],
            kind=kind,
            threshold=found.get("threshold"),
            k=config.get("k"),
            centred=bool(config["apply_b_dec_to_input"]),
            site=site,
            layer=layer,
        )

    def encode(self, activations: Any) -> "torch.Tensor":
        """Features `[…, n]`; 0 is off."""
        import torch

        x = torch.as_tensor(activations).float()
        x = x - self.decoder_bias if self.centred else x
        before = x @ self.encoder + self.encoder_bias
        if self.kind == "jumprelu":
            assert self.threshold is not None
            return torch.relu(before) * (before > self.threshold)
        if self.kind == "topk":
            assert self.k is not None
            values, index = before.topk(self.k, -1)
            return torch.zeros_like(before).scatter(-1, index, torch.relu(values))
        return torch.relu(before)

    def decode(self, features: "torch.Tensor") -> "torch.Tensor":
        """Activations `[…, d]`."""
        return features @ self.decoder + self.decoder_bias

    def direction(self, feature: int) -> Direction:
        """What one feature writes, to steer with or to project on."""
        n = len(self.decoder)
        if not -n <= feature < n:
            raise ValueError(f"feature {feature} is not there: there are {n} (0-{n - 1})")
        return Direction(self.decoder[feature], self.site, self.layer, "sae", {"feature": feature % n})

    def __repr__(self) -> str:
        d, n = self.encoder.shape
        where = self.site if self.layer is None else f"{self.site}.{self.layer}"
        return f"Features({where}, {n} of {d} numbers, {self.kind})"


def _site_of(config: dict[str, Any], folder: Path) -> tuple[str, int | None]:
    """Site and layer from TransformerLens's hook name."""
    name = config.get("hook_name") or config.get("metadata", {}).get("hook_name")
    if name is None:
        return "resid_post", None
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _HOOKS:
        raise StoreError(f"the autoencoder in {folder} reads {name!r}, which is no site here")
    return _HOOKS[match[2]], int(match[1])
