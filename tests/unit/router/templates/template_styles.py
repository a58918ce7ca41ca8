"""Chat templates in the styles in which models are published; the wording is our own."""

from __future__ import annotations

# Takes only parts: a string has no parts of type 'text', so it would vanish.
LLAVA = """\
{%- for m in messages -%}
{%- if m['role'] != 'system' %}{{ m['role'] | upper + ': ' }}{% endif -%}
{%- for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor -%}
{%- for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif -%}"""

# Takes either form, and has a default system message.
QWEN_VL = """\
{%- for m in messages -%}
{%- if loop.first and m['role'] != 'system' %}{{ '[system]You help.[end]' }}{% endif -%}
{{ '[' + m['role'] + ']' }}
{%- if m['content'] is string %}{{ m['content'] }}
{%- else %}
{%- for part in m['content'] -%}
{%- if part['type'] == 'image' or 'image' in part %}{{ '[picture]' }}
{%- elif 'text' in part %}{{ part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}{{ '[end]' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""

# Takes only strings: adding a list to a string is an error.
QWEN = """\
{%- if messages[0]['role'] == 'system' %}{{ '[system]' + messages[0]['content'] + '[end]' }}
{%- else %}{{ '[system]You help.[end]' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or m.role == 'assistant' %}
{{- '[' + m.role + ']' + m.content + '[end]' }}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""

# Takes only strings: a list would be printed as Python writes it.
LLAMA_3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '[' + m['role'] + ']\n\n' + m['content'] | trim + '[eot]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\n\n' }}{% endif -%}"""

# Like Llama 3, with pictures: user and assistant messages in either form, system messages only as strings.
LLAMA_3_VISION = """\
{%- if messages[0]['role'] == 'system' %}
{{- '[system]' + messages[0]['content'] | trim + '[eot]' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{{- '[' + m['role'] + ']' }}
{%- if m['content'] is string %}{{ m['content'] }}
{%- else %}
{%- for part in m['content'] -%}
{%- if part['type'] == 'image' %}{{ '[picture]' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif -%}
{%- endfor %}
{%- endif %}{{ '[eot]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""

# Takes only strings, requires alternation, and prints the system message before the last user message.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for m in loop_messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant') }}
{%- endif %}
{%- if m['role'] == 'user' %}
{%- if loop.last and system_message is defined %}{{ '[INST] ' + system_message + '\n\n' + m['content'] + '[/INST]' }}
{%- else %}{{ '[INST] ' + m['content'] + '[/INST]' }}
{%- endif %}
{%- else %}{{ ' ' + m['content'] + eos_token }}
{%- endif %}
{%- endfor -%}"""

# Like Gemma 3: the system message joins the first user message, and only its first part is used.
GEMMA = """\
{%- set prefix = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{% set prefix = messages[0]['content'] + '\n\n' %}
{%- else %}{% set prefix = messages[0]['content'][0]['text'] + '\n\n' %}
{%- endif %}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
{{- '[' + m['role'] + ']' + (prefix if loop.first else '') }}
{%- if m['content'] is string %}{{ m['content'] | trim }}
{%- else %}
{%- for part in m['content'] %}{{ part['text'] | trim }}{% endfor %}
{%- endif %}{{ '[end]' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[model]' }}{% endif -%}"""
