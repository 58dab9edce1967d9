"""Chat templates in the manner of the model families in use."""

from __future__ import annotations

__all__ = ["TEMPLATES"]

_CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TRIMMING_WITH_BOS = """{{- bos_token }}
{%- set day = strftime_now("%d %b %Y") %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\n\\nToday: ' + day + '<|im_end|>' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n\\n' + (message.content | trim) + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""

_WITH_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set state.last = messages | length - 1 - loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > state.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {%- generation %}{{- content.split('</think>')[-1].lstrip('\\n') }}{%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' ~ call.function.name ~ ' ' ~ (call.function.arguments | tojson) ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

_ALTERNATING = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + message['content'] + eos_token }}{%- endif %}{% endfor %}"""

_WALKING_PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{% endif %}<|im_end|>
{% endfor %}"""

TEMPLATES = {
    "chatml": _CHATML,
    "trimming, with begin token and date": _TRIMMING_WITH_BOS,
    "with tools and reasoning": _WITH_TOOLS,
    "alternating roles": _ALTERNATING,
    "walking over parts": _WALKING_PARTS,
}
