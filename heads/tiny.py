"""Random targets for tests and smoke runs: a small Llama and its tokenizer, made from a seed without a network."""

from pathlib import Path
from typing import Any

from headstart.heads.made_targets import build_once, cache_folder
from headstart.heads.store import hash_json

TEXT = """\
The river rises in the hills and runs for ninety miles before it reaches the sea.
In spring the snow melts, the water is high, and the boats stay in the harbour.
A baker opens the shop at five, lights the oven, and weighs flour, salt and yeast.
Which of these numbers is larger: 17, 23, 105 or 98? The answer is 105.
If a train leaves at 8:40 and the journey takes 95 minutes, it arrives at 10:15.
def add(first, second):
    return first + second
for item in items:
    print(item, sum(values) / len(values))
{"name": "Ada", "age": 36, "city": "London", "tags": ["maths", "engines"]}
Write a short letter to a friend about the weather, the garden and the new house.
To make tea, boil the water, warm the pot, add the leaves, and wait for four minutes.
Can you explain what a prime number is? A prime number has exactly two divisors.
The teacher asked the children to read the story again and to say what they liked.
There are three things to remember: be kind, be clear, and check the result.
I think that this is the right way to do it, but we should ask someone else first.
Some people prefer the mountains, others the coast; both are beautiful in autumn.
List the steps, then explain each step in one sentence, and give an example.
"""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# Everything that decides the bytes of a tiny target; its hash is in the folder name.
TINY: dict[str, Any] = {
    "format": 3,
    "seed": 7,
    "num_tokens": 500,
    "text": TEXT,
    "chat_template": CHATML,
    "config": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def tiny_folder(tied: bool) -> Path:
    """Folder of `tiny` or `tiny-tied`, made on first use."""
    name = "tiny-tied" if tied else "tiny"
    folder = cache_folder() / "targets" / f"{name}-{hash_json([TINY, tied])[:12]}"
    return build_once(folder, lambda temporary: write_tiny(temporary, tied))


def write_tiny(folder: Path, tied: bool) -> None:
    """Write a random Llama whose greedy replies wander and sometimes stop, with a byte-level ChatML tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    stop_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = LlamaConfig(
        **TINY["config"],
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=stop_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(TINY["seed"] + tied)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # Fan-in scaling times a gain: large enough that every layer changes the residual stream visibly.
                gain = 0.35 * config.hidden_size**0.5 if "embed" in key or "lm_head" in key else 2.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
        # Were the gain 1, the state in front of the final norm would pass for the one behind it.
        gain_H = model.model.norm.weight
        gain_H.copy_(torch.exp(0.2 * torch.randn(gain_H.shape, generator=generator)))
        if not tied:
            model.lm_head.weight[stop_id] *= 1.3  # so that some replies stop early
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def tiny_tokenizer() -> Any:
    """Byte-level BPE trained on a committed text: `num_tokens` entries with digits split one by one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["num_tokens"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TINY["text"].splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=1024
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = TINY["chat_template"]
    return wrapped
