"""Settings of the target and of every head kind. No torch here: help and `check` answer at once."""

from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.heads.rules import Conflicts, Count, NonNegative, PathText, Positive


@dataclass(frozen=True)
class TargetSettings:
    """The frozen model whose output distribution never changes."""

    model: PathText = "smollm2-135m"
    """Built-in name (`smollm2-135m`), a folder, or a hub id of a transformers causal LM."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the target for traffic and features: auto (bfloat16 where the processor has it), float32 or bfloat16."""
    device: str = "auto"
    """auto (the first accelerator, else cpu), or a torch device string."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of the target: auto, sdpa or eager."""
    sharded: bool = False
    """Spread its layers over all processes, for a target that no device holds; heads then train on its stored states."""


@dataclass(frozen=True)
class HeadSettings:
    """What every head kind has; the kinds below add their own."""

    kind: str = ""
    """Which head is trained; `headstart ls heads` says what each is."""
    draft_vocab_size: Count = 8192
    """Tokens the head can draft; 0 means the target's whole vocabulary."""
    init_from_target: bool = True
    """Start from the target's weights wherever the head has a place for them."""
    init_from: PathText = ""
    """Start from a trained head: a run, a checkpoint, or a published folder. Saved heads name it by its hash."""

    @property
    def asked_taps(self) -> list[int]:
        """Taps that features have to hold for this head; none means the default ones, which all kinds then share."""
        return []

    @property
    def continues_text(self) -> bool:
        """Whether it can go on and on by itself, without states of the target."""
        return False

    @property
    def predicts_final(self) -> bool:
        """Whether the states that are projected to logits stand for the target's own final states."""
        return False

    @property
    def max_depth(self) -> int | None:
        """Drafted tokens that the head has weights for; None where it recycles its own states without end."""
        return None

    @property
    def depth_setting(self) -> str:
        """The setting that `max_depth` is read from."""
        return "num_heads"

    def rope_parameters(self, of_target: dict[str, Any]) -> dict[str, Any]:
        """The head's rotary positions, given the target's; transformers' form."""
        return of_target


@dataclass(frozen=True)
class LayerSettings(HeadSettings):
    """What kinds of one decoder layer of our own share."""

    intermediate_size: Count = 0
    """Width of the head's MLP; 0 means the target's."""
    rope_theta: NonNegative = 0.0
    """Base of the head's own, unscaled rotary positions; 0 means the target's positions, which is right for new heads."""

    def rope_parameters(self, of_target: dict[str, Any]) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.rope_theta} if self.rope_theta else of_target


@dataclass(frozen=True)
class Eagle3Settings(LayerSettings):
    """EAGLE-3 head (arXiv 2503.01840) and the flags of EAGLE 3.1 (arXiv 2605.09992): one layer that recycles its state."""

    kind: Literal["eagle3"] = "eagle3"
    taps: list[Count] = field(default_factory=list)
    """Residual streams read from the target, L = after L layers, ascending. Empty: [2, N // 2, N - 3], as served."""
    norm_before_residual: bool = False
    """Whether the residual branch carries the normed feature (true) or the raw one (false)."""
    fc_norm: bool = False
    """EAGLE 3.1: norm each tap before the fusing projection."""
    norm_output: bool = False
    """EAGLE 3.1: recycle the normed state between depths instead of the raw one."""

    @property
    def asked_taps(self) -> list[int]:
        return self.taps

    def conflicts(self) -> Conflicts:
        if self.taps != sorted(set(self.taps)):
            yield "taps", f"found {self.taps}, expected ascending tap ids without repeats: {sorted(set(self.taps))}"


@dataclass(frozen=True)
class Eagle1Settings(LayerSettings):
    """EAGLE head (arXiv 2401.15077): one layer that predicts the target's next final state."""

    kind: Literal["eagle1"] = "eagle1"

    @property
    def predicts_final(self) -> bool:
        return True


@dataclass(frozen=True)
class SlotSettings(HeadSettings):
    """What kinds without attention share: a fixed number of drafted tokens."""

    num_heads: Positive = 4
    """Tokens it can draft: train.depth has to be equal, and no draft is longer."""
    own_output: bool = False
    """One output layer for each drafted token (true), or one for all (false), which is stored once."""

    @property
    def max_depth(self) -> int | None:
        return self.num_heads


@dataclass(frozen=True)
class MedusaSettings(SlotSettings):
    """Medusa heads (arXiv 2401.10774): residual blocks on the final state, which read no token."""

    kind: Literal["medusa"] = "medusa"
    num_layers: Positive = 1
    """Residual blocks for each drafted token."""


@dataclass(frozen=True)
class HydraSettings(SlotSettings):
    """Hydra heads (arXiv 2402.05109): Medusa's blocks, which also read the tokens drafted before; no engine loads them."""

    kind: Literal["hydra"] = "hydra"
    num_layers: Positive = 1
    """Residual blocks for each drafted token."""


@dataclass(frozen=True)
class MLPSettings(SlotSettings):
    """MLP speculator (arXiv 2404.19124): a recurrent state that takes in one drafted token a step."""

    kind: Literal["mlp"] = "mlp"
    inner_size: Count = 0
    """Width of the state and of the token table; 0 means the target's."""
    tie_weights: bool = True
    """One token table, norm and (from the second step on) projection for all steps."""
    scale_input: bool = True
    """Norm the target's final state before the first step."""

    def conflicts(self) -> Conflicts:
        if self.tie_weights and self.num_heads == 1:
            yield "tie_weights", "found true with num_heads = 1: there is nothing to tie; set it to false"


@dataclass(frozen=True)
class DraftSettings(HeadSettings):
    """Draft model (arXiv 2211.17192): a small language model that reads the text alone, cut from the target or its own."""

    kind: Literal["draft"] = "draft"
    draft_vocab_size: Count = 0
    """Tokens the head can draft; 0, the default of this kind, means the target's whole vocabulary."""
    model: PathText = ""
    """Model it starts as: a built-in name, a folder, or a hub id, with the target's tokenizer. Empty: the target itself."""
    layers: list[Count] = field(default_factory=list)
    """Decoder layers kept of that model, ascending. Empty: all, of the target an eighth from the first to the last."""
    train_output: bool = False
    """Train an output layer of its own, which starts as the model's; false keeps the model's, frozen."""
    lora_rank: Count = 0
    """Rank of adapters trained beside the frozen layers (LoRA, arXiv 2106.09685); 0 trains the layers themselves."""

    @property
    def continues_text(self) -> bool:
        return True

    def conflicts(self) -> Conflicts:
        for name in ("model", "lora_rank"):
            if (value := getattr(self, name)) and not self.init_from_target:
                yield "init_from_target", f"found false with {name} = {value}, which is made of given weights: drop one"
        if self.layers != sorted(set(self.layers)):
            yield (
                "layers",
                f"found {self.layers}, expected ascending layers without repeats: {sorted(set(self.layers))}",
            )


@dataclass(frozen=True)
class MTPSettings(HeadSettings):
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): decoder layers that read a final state and a token."""

    kind: Literal["mtp"] = "mtp"
    draft_vocab_size: Count = 0
    """Tokens the head can draft; 0 means the target's whole vocabulary, whose output head engines share with it."""
    num_modules: Positive = 1
    """1: one layer that recycles its state, for drafts of any length. More: a layer for each drafted token, and no more."""
    intermediate_size: Count = 0
    """Width of each layer's MLP; 0 means the target's."""
    shipped: bool = False
    """Fine-tune the MTP layer that the target ships, as its engines run it, instead of training one of its own."""

    def conflicts(self) -> Conflicts:
        fixed = {"num_modules": 1, "intermediate_size": 0, "init_from_target": True}
        for name, value in fixed.items():
            if self.shipped and (found := getattr(self, name)) != value:
                yield name, f"found {found} with shipped = true: the layer is what the target ships; expected {value}"

    @property
    def predicts_final(self) -> bool:
        return True

    @property
    def max_depth(self) -> int | None:
        return None if self.num_modules == 1 else self.num_modules

    @property
    def depth_setting(self) -> str:
        return "num_modules"


HEADS: dict[str, type[HeadSettings]] = {
    "eagle3": Eagle3Settings,
    "eagle1": Eagle1Settings,
    "medusa": MedusaSettings,
    "hydra": HydraSettings,
    "mlp": MLPSettings,
    "draft": DraftSettings,
    "mtp": MTPSettings,
}
