"""Tokenizers with the chat templates of known model families, in their shape, with own words.

Bytes are the ordinary tokens; the markers of a family are special or added tokens as they are in
the real tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

QWEN_TOOLS = """\
{%- macro system(text) %}{{- '<|im_start|>system\\n' + text }}
{%- if tools %}{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall them as <tool_call>{"name": .., "arguments": ..}</tool_call>' }}
{%- endif %}{{- '<|im_end|>\\n' }}{%- endmacro %}
{%- if messages[0].role == 'system' %}{{- system(messages[0].content) }}
{%- else %}{{- system('You help.') }}{%- endif %}
"""
QWEN_RESULT = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}{%- endfor %}
"""
USER = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
"""

# the calls of a turn of the assistant, and its end
QWEN_CALLS = """\
{%- for call in message.tool_calls or [] %}{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
"""

QWEN25 = (
    QWEN_TOOLS
    + USER
    + """\
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
"""
    + QWEN_CALLS
    + QWEN_RESULT
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

QWEN3 = (
    QWEN_TOOLS
    + """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}
"""
    + USER
    + """\
{%- elif message.role == 'assistant' %}
{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = '' %}
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said }}
"""
    + QWEN_CALLS
    + QWEN_RESULT
    + """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{%- endif %}"""
)

QWQ = (
    QWEN_TOOLS
    + USER
    + """\
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
"""
    + QWEN_CALLS
    + QWEN_RESULT
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

LLAMA31 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set words = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set words = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- words + '<|eot_id|>' }}
{%- set ns = namespace(first=true) %}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('One call a turn!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
{{- '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and message.role == 'user' and ns.first %}{%- set ns.first = false %}
{{- 'Functions:\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# puts the tools before the last message, as some do: the earlier text changes
MOVES_TOOLS = """\
{%- for message in messages %}
{%- if loop.last and tools %}{{- '<tools>' + (tools | tojson) + '</tools>' }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}<tool_call>"""

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip


def make_tokenizer(template: str) -> Any:
    """A byte tokenizer of that family; Llama's puts a begin-of-text token before each text."""
    llama = "begin_of_text" in template or "bos_token" in template
    if llama:
        return byte_tokenizer(template, LLAMA_SPECIAL, eos="<|eot_id|>", bos=LLAMA_SPECIAL[0])
    thoughts = ("<think>", "</think>") if "<think>" in template else ()
    return byte_tokenizer(template, QWEN_SPECIAL, (*QWEN_ADDED, *thoughts), eos="<|im_end|>")


def byte_tokenizer(
    template: str,
    special: Sequence[str],
    added: Sequence[str] = (),
    *,
    eos: str,
    bos: str | None = None,
) -> Any:
    """A token for each byte, for each of the `special` texts and for each of the `added` ones; a
    `bos` is put before each text."""
    import tokenizers
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = bytes_tokenizer()
    token = tokenizers.AddedToken
    backend.add_special_tokens([token(text, special=True, normalized=False) for text in special])
    backend.add_tokens([token(text, normalized=False) for text in added])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=list(special),
        chat_template=template,
    )


def bytes_tokenizer() -> Any:
    """Of the package tokenizers: a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
