"""Chat templates that print tool calls, in the styles in which models are published; the wording is our own."""

from __future__ import annotations

# Prints calls only if the content is null, joins arguments as text, and keeps only the last system message.
DEEPSEEK_R1 = """\
{%- set ns = namespace(system='', called=false) %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '[user]' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}
{{- '[call]' + call['type'] + '[sep]' + call['function']['name'] + '\n' + call['function']['arguments'] + '[/call]' }}
{%- endfor %}
{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
{{- '[assistant]' + m['content'].split('</think>')[-1] + '[end]' }}
{%- endif %}
{%- if m['role'] == 'tool' %}{{ '[output]' + m['content'] + '[/output]' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif -%}"""

# Text and calls in one message, arguments as JSON of an object.
QWEN_2_5 = """\
{%- if tools %}{{ '[system]' + (tools | tojson) + '[end]' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') or (m.role == 'assistant' and not m.tool_calls) %}
{{- '[' + m.role + ']' + m.content + '[end]' }}
{%- elif m.role == 'assistant' %}
{{- '[assistant]' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}
{%- if call.function is defined %}{% set call = call.function %}{% endif %}
{{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '[end]' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '[user]' }}{% endif %}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""

# Like Qwen 2.5, with the reasoning that belongs to the last question, and arguments in either form.
QWEN_3 = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role in ('user', 'system') %}{{ '[' + m.role + ']' + content + '[end]' }}
{%- elif m.role == 'assistant' %}
{{- '[assistant]' }}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}
{{- '<think>' + m.reasoning_content + '</think>' }}
{%- endif %}{{ content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}
{%- endif %}{{ '}</tool_call>' }}
{%- endfor %}{{ '[end]' }}
{%- elif m.role == 'tool' %}{{ '[user]<tool_response>' + content + '</tool_response>[end]' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""

# One call per message, and no text beside it.
LLAMA_3_1 = """\
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '[assistant]{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}[eot]' }}
{%- elif m.role == 'tool' %}{{ '[ipython]' + (m.content | tojson) + '[eot]' }}
{%- else %}{{ '[' + m.role + ']' + m.content | trim + '[eot]' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""

# Demands alternating roles and ids of nine characters, and has no place for text beside calls.
MISTRAL_3 = """\
{%- for m in messages | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is undefined or call.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}
{%- if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}
{{- raise_exception('ids have length 9') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor -%}"""

# Arguments as pairs of tags, contents in any form.
GLM_4_5 = """\
{%- macro visible(content) %}
{%- if content is string %}{{ content }}
{%- else %}{% for part in content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}
{%- endmacro %}
{%- for m in messages %}
{%- if m.role == 'user' %}[user]{{ visible(m.content) }}
{%- elif m.role == 'assistant' %}[assistant]<think></think>{{ visible(m.content) | trim }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if m.content is string %}[observation]<tool_response>{{ m.content }}</tool_response>
{%- else %}[observation]{% for each in m.content %}<tool_response>{{ each.output or each }}</tool_response>{% endfor %}
{%- endif %}
{%- elif m.role == 'system' %}[system]{{ visible(m.content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{% endif -%}"""

# Demands the name of the function in results, and has no place for text beside calls.
HERMES = """\
{{- bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') or (m.role == 'assistant' and m.tool_calls is not defined) %}
{{- '[' + m.role + ']' + m.content + '[end]' }}
{%- elif m.role == 'assistant' %}
{{- '[assistant]' }}
{%- for call in m.tool_calls %}
{{- '<tool_call>{"arguments": ' + (call.function.arguments | tojson) }}
{{- ', "name": "' + call.function.name + '"}</tool_call>' }}
{%- endfor %}{{ '[end]' }}
{%- elif m.role == 'tool' %}
{%- if m.name is not defined %}{{ raise_exception("results need a 'name'") }}{% endif %}
{{- '[tool]{"name": "' + m.name + '", "content": ' + (m.content | tojson) + '}[end]' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]' }}{% endif -%}"""
