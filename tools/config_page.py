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

`tidekv prefill` and `tidekv decode` read their options from these sources, of which later ones override earlier ones:

1. the defaults below;
2. the file of `--config FILE`, or of the variable `TIDEKV_CONFIG`: TOML, YAML or JSON, by its suffix;
3. environment variables: `TIDEKV_ENGINE_ADMISSION_QUEUE_MAX` for `engine.admission.queue_max`. One that names no option
   is an error, except those that Kubernetes creates for a Service (`TIDEKV_…_SERVICE_HOST`, `TIDEKV_…_PORT`);
4. `--set section.option=value`, any number of times;
5. the command's own flags, for example `--listen`.

In 3 and 4 lists are separated by commas, and tables are JSON objects.

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

`tidekv config show` prints every option with its value and source, `tidekv config check` every error with its place,
`tidekv config schema` the JSON Schema, for completion in editors. An embedder passes an `EngineConfig`, whose groups
are the tables of `[engine]`:

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

Below, a number whose default has no decimal point is a whole one, a time is at most a year, and an option with no
default has no value. What listens, publishes or writes is off while its address or path has none; with port 0 the
system chooses.

## Sizes of pools

`cache.l1` and `cache.l2` accept bytes (`1073741824`, `"64GB"`, `"512MiB"`), pages (`"4096 pages"`), a share (`"80 %"`
of what is free, `"50 % of total"`), `"auto"` (the command chooses), and for `l2` a multiple of L1 (`"2x"`). Free memory
is what the process's control groups leave. On the CPU both pools share the same memory, and L1 is taken first. A size
above the free memory is refused before anything starts.
"""


MORE = {
    "cache.l2_path": "when-a-worker-goes-away.md#a-host-pool-that-lasts",
    "storage.uri": "storage.md",
    "transport.data_network": "threat-model.md#the-data-plane-reach-is-write-access",
    "engine.device": "embedding.md#in-device-pages-of-a-host-engine",
    "engine.page_checksums": "operating.md#checksums-of-pages",
    "engine.namespace_share": "how-it-works.md#eviction",
    "engine.close_store_s": "when-a-worker-goes-away.md#a-drain-that-stores",
    "engine.cache_peers.close_to": "when-a-worker-goes-away.md#a-drain-to-a-successor",
    "engine.admission.prefill_share": "how-it-works.md#page-ownership",
    "engine.snapshots.per_request": "embedding.md#snapshots-of-states",
    "engine.peer.staging_bytes": "ranks.md#prefill-with-ranks",
    "engine.journal.log": "journal.md",
    "engine.kv_events.routers": "kv-events.md#which-routers-listen",
}
"""The page that explains an option, by its path."""


def configuration_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for section, kind in section_types().items():
        summary = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        if section == "engine":
            summary = "The decode engine: fields of `EngineConfig`. Each table below is one of its groups."
        elif section.startswith("engine."):
            summary += f" In Python `{kind.__name__}`."
        rows = [_row(option) for option in all_options().values() if option.section == section]
        table = ["| option | default (allowed) | effect |", "|---|---|---|", *rows]
        parts.append(f"## [{section}]\n\n{summary}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    effect = option.effect.replace("|", "\\|")
    if option.path in MORE:
        effect += f" [More]({MORE[option.path]})"
    return f"| `{option.name}` | {_value(option)} | {effect} |"


def _value(option: Option) -> str:
    """Return the default, and what else is allowed; without a default only the latter."""
    unit = "" if option.name.endswith("_s") or option.unit in option.name.split("_") else option.unit
    brief = _brief(allowed(option.type), unit)
    if option.default in ("", None):
        return brief
    plain = msgspec.to_builtins(option.default)
    default = f"`{plain if isinstance(plain, str) else json.dumps(plain)}`"
    return default if brief in ("bool", "text") else f"{default} ({brief})"


def _brief(words: str, unit: str) -> str:
    """Return what is allowed in signs; errors have it in words. The default says whether a number is whole."""
    words = re.sub("UTF-8 text( without NUL)?", "text", words).removesuffix(" or none").replace("true or false", "bool")
    words = words.removeprefix("a whole ").removeprefix("a ")
    words = words.replace("number above 0, at most 31,536,000", "> 0").replace("number from 0 to 31,536,000", "≥ 0")
    words = re.sub(r"^number, (\S+) or more", r"≥ \1", words)
    words = re.sub(r"^number above 0, at most (\S+)", r"> 0, ≤ \1", words)
    words = re.sub(r"^number from (\S+) to (\S+)", r"\1 to \2", words)
    is_measured = bool(unit) and not unit.startswith(("a share", "times"))
    return f"{words} {unit}" if is_measured and re.match(r"[>≥\d]", words) else words


if __name__ == "__main__":
    print(configuration_page(), end="")
