"""The numbers about a target that a head is built from; no weights, no torch."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetFacts:
    """Read once from the target's config; stored in every head's `head.json`."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding table, padding included
    num_tokens: int  # ids the tokenizer can produce; ids from here on are never drafted
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # transformers' form: {"rope_type": "default", "rope_theta": 1e5, ..}
    max_position: int
    special_ids: list[int]  # specials and stop tokens, ascending
    stop_ids: list[int]
    fingerprint: dict[str, str]  # weights, config, tokenizer, chat_template
    llama_like: bool = True  # layers of RMS norm, rotary attention, RMS norm and a gated MLP with silu, but for:
    layer_biases: list[str] = field(default_factory=list)  # projections of a layer that have a bias
    query_key_norm: bool = False  # queries and keys are normed, each head by itself
    shipped: dict[str, Any] = field(default_factory=dict)  # MTP layer in its files, as `heads/shipped.py` says it
    model_type: str = ""  # its family, by transformers' name
    architectures: list[str] = field(default_factory=list)  # classes that its config names

    @property
    def shown_name(self) -> str:
        """What an export calls it: a hub id or a built-in name as it is, of a folder's path the last part alone."""
        folder = Path(self.name).expanduser()
        return folder.resolve().name if folder.is_dir() or folder.is_absolute() else self.name

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TargetFacts":
        return cls(**values)


def default_taps(num_layers: int) -> list[int]:
    """The taps serving engines fall back to: (2, N // 2, N - 3), clamped to distinct valid ids on shallow targets."""
    taps = sorted({min(max(tap, 0), num_layers) for tap in (2, num_layers // 2, num_layers - 3)})
    candidate = 0
    while len(taps) < 3 and candidate <= num_layers:
        if candidate not in taps:
            taps.append(candidate)
        candidate += 1
    return sorted(taps)


def told_taps(taps: list[int], num_layers: int) -> str:
    """Tap ids with what each one is, for the console: engines and papers count layers in several ways."""
    ends = {0: "the embedding", num_layers: f"after all {num_layers} layers, before the final norm"}
    parts = [f"{tap} {ends.get(tap) or f'after {tap} layer' + 's' * (tap > 1)}" for tap in taps]
    return f"the residual stream of {num_layers} layers: {', '.join(parts)}"
