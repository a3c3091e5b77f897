"""Chat templates in the styles that targets have, and a small byte-level tokenizer that knows all their special tokens.

A style says how a plain conversation reads: `header` opens the assistant's turn, `end` closes it.
"""

from dataclasses import dataclass, replace
from functools import cache

from headstart.heads.facts import TargetFacts
from headstart.heads.tiny import TEXT
from tests.small_training import FACTS

SPECIALS = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<｜begin｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end｜>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
]

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- for call in message.tool_calls or [] %}
        {{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}
    {%- endfor %}
    {{- (message['content'] or '') | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Thinking of earlier turns is dropped; with the switch off, an empty block is the prompt's.
QWEN_THINKING = """\
{%- set spot = namespace(user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set spot.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- set said = message.content or '' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1] %}
            {%- set said = said.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > spot.user and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') }}
        {%- else %}{{- said }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
    {%- else %}{{- message.content }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + (messages[0].content + '\n\n' if loop.index0 == 1 and messages[0].role == 'system' else '') }}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[INST] result: ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}{{- '[TOOL_CALLS]' + (message.tool_calls | tojson) + eos_token }}
    {%- else %}{{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- raise_exception('no system turn here') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""

# The prompt opens a think block, and replies lose theirs.
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end｜>' }}
    {%- else %}{{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{% endif %}"""

HARMONY = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}{GEN}{{- message.content }}{IN}{{- '<|im_end|>' }}{OUT}{{- '\n' }}
    {%- else %}{{- message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def chatml(tags: str = "") -> str:
    """ChatML: without generation tags, or with ones that close `outside` or `inside` of the end of turn."""
    places = {"GEN": "{% generation %}" if tags else "", "IN": "", "OUT": ""}
    if tags:
        places["OUT" if tags == "outside" else "IN"] = "{% endgeneration %}"
    template = CHATML
    for name, text in places.items():
        template = template.replace(f"{{{name}}}", text)
    return template


@dataclass(frozen=True)
class Style:
    template: str
    header: str  # what opens the assistant's turn in the prompt
    end: str  # what the target ends its turn with
    stop: str
    said: str = ""  # what the target says before a plain reply
    bos: str | None = None
    system: bool = True


STYLES = {
    "llama3": Style(
        LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "<|eot_id|>", bos="<|begin_of_text|>"
    ),
    "chatml": Style(chatml(), "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>"),
    "chatml-tags": Style(chatml("outside"), "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>"),
    "mistral": Style(MISTRAL, "[/INST]", "</s>", "</s>", said=" ", bos="<s>"),
    "gemma": Style(GEMMA, "<start_of_turn>model\n", "<end_of_turn>", "<end_of_turn>", bos="<bos>", system=False),
    "harmony": Style(
        HARMONY, "<|start|>assistant", "<|return|>", "<|return|>", said="<|channel|>final<|message|>"
    ),
    "deepseek": Style(DEEPSEEK, "<｜Assistant｜><think>\n", "<｜end｜>", "<｜end｜>", bos="<｜begin｜>"),
    "qwen": Style(QWEN_THINKING, "<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>"),
}  # fmt: skip


@cache
def byte_tokenizer(text: str = TEXT, words: bool = True):
    """A byte-level BPE; without `words`, tokens may reach over blanks and punctuation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return tokenizer


def style_tokenizer(template: str, stop: str, bos: str | None = None, base=None):
    """A tokenizer of transformers with this template; `stop` is its end of sequence."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base or byte_tokenizer(), eos_token=stop, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer


def style_facts(tokenizer, stops: list[str]) -> TargetFacts:
    ids = tokenizer.convert_tokens_to_ids
    return replace(
        FACTS, name="styled", vocab_size=len(tokenizer), num_tokens=len(tokenizer), special_ids=sorted(ids(SPECIALS)),
        stop_ids=sorted(ids(stops)),
    )  # fmt: skip
