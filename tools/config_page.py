"""Generator of docs/configuration.md from the option types: `python -m tools.config_page > docs/configuration.md`."""

from __future__ import annotations

import json
import re

import msgspec

from tidekv.engine.config.options import Option, all_options, section_types
from tidekv.states.validation import allowed

INTRODUCTION = """\
# Configuration

<!-- Generated: python -m tools.config_page > docs/configuration.md; a test compares. -->

`tidekv prefill` and `tidekv decode` read one file (TOML, YAML or JSON, by its suffix), environment variables, and
flags. Later sources override earlier ones:

1. the defaults below;
2. the file of `--config FILE`, or of the variable `TIDEKV_CONFIG`;
3. environment variables: `TIDEKV_` and the option's path with underscores, for example
   `TIDEKV_ENGINE_ADMISSION_QUEUE_MAX` for `engine.admission.queue_max`;
4. `--set section.option=value`, for example `--set engine.storage.write=back`, any number of times;
5. the command's own flags, for example `--listen`.

```toml
[cache]
page_size = 64
device = "cuda:0"
l1 = "80 %"      # Of the free device memory.
l2 = "2x"        # Twice L1.

[storage]
uri = "file:/var/lib/tidekv?capacity=200GB"

[transport]
secret_file = "/run/secrets/tidekv"

[engine.storage]
prefetch = "timeout"

[engine.metrics]
listen = "127.0.0.1:9464"
```

`tidekv config show` prints every option with its value and source. `tidekv config check` lists every error with its
place and exits with code 2 if there is one. `tidekv config schema` prints the JSON Schema, for completion in editors. A
command does not start with an error in its configuration. An embedder passes an `EngineConfig`, whose groups are the
tables of `[engine]`:

```python
import tidekv

config = tidekv.EngineConfig(
    model="my-model",
    storage=tidekv.StorageOptions(prefetch="best_effort"),
    journal=tidekv.JournalOptions(path="run.journal"),
)
```

`load()` builds one from the same sources as the commands:

```python
from tidekv.engine.config import load

loaded = load("worker.toml")
config = loaded.configuration.engine  # An EngineConfig.
```

In variables and `--set`, lists are separated by commas and tables are JSON objects. Variables that Kubernetes creates
for a Service (`TIDEKV_…_SERVICE_HOST`, `TIDEKV_…_PORT`) are ignored; any other `TIDEKV_` variable that names no option
is an error.

Below, text is UTF-8 without NUL, and a time is at most a year (31,536,000 s).

## Sizes of pools

`cache.l1` and `cache.l2` accept bytes (`1073741824`, `"64GB"`, `"512MiB"`), pages (`"4096 pages"`), a share (`"80 %"`
or `"80 % of what is free"`, `"50 % of total"`), `"auto"`, and for `l2` a multiple of L1 (`"2x"`). Free memory is what
the kernel could provide within every control group that bounds the process (version 1 or 2, with all parents); memory
of clean file pages counts as free. On the CPU both pools share the same memory, and L1 is taken first. A size above the
free memory is refused before anything starts.
"""


def configuration_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for section, kind in section_types().items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        if section == "engine":
            summary = "The decode engine: fields of `EngineConfig`. Each table below is one of its groups."
        elif section.startswith("engine."):
            summary += f" In Python `{kind.__name__}`."
        rows = [_row(option) for option in all_options().values() if option.section == section]
        table = ["| option | allowed | default | effect |", "|---|---|---|---|", *rows]
        parts.append(f"## [{section}]\n\n{summary}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    effect = option.effect.replace("|", "\\|")
    values = _brief(allowed(option.type))
    unit = f" ({option.unit})" if option.unit else ""
    return f"| `{option.name}` | {values}{unit} | {_default(option)} | {effect} |"


def _brief(words: str) -> str:
    """Return what is allowed in signs; errors have it in words."""
    words = (
        words.replace("UTF-8 text without NUL", "text")
        .replace("UTF-8 text", "text")
        .replace("a whole number", "whole number")
    )
    words = re.sub(r"number, (\S+) or more", r"number ≥ \1", words)
    words = re.sub(r"a number above 0, at most 31,536,000", "number > 0", words)
    words = re.sub(r"a number from 0 to 31,536,000", "number ≥ 0", words)
    return re.sub(r"a number above 0, at most 1\b", "number > 0, ≤ 1", words)


def _default(option: Option) -> str:
    if option.default in ("", None):
        return "none" if option.default is None else "empty"
    plain = msgspec.to_builtins(option.default)
    return f"`{plain if isinstance(plain, str) else json.dumps(plain)}`"


if __name__ == "__main__":
    print(configuration_page(), end="")
