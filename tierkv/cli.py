"""The command ``tierkv``: parse, call the API, print.

``config show`` lives here, ``doctor`` in `tierkv.doctor`, any other command in ``tierkv.cli_*``.
Exit codes: 0 done, 1 ``doctor`` or ``store verify`` found something broken or ``store gc`` came not
down to its goal, 2 an error (one line on stderr; TIERKV_DEBUG=1 shows the traceback), 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tierkv
from tierkv.codec_names import CODECS
from tierkv.config import (
    ATTENTIONS,
    COLD_MISSES,
    DTYPES,
    SELECTORS,
    Config,
    GenerateConfig,
    Setting,
    Settings,
    converted_dir,
    load_settings,
)
from tierkv.errors import TierKVError
from tierkv.units import format_bytes

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

_HELP = {
    "gpu_budget": ("SIZE", "KV bytes on the compute device"),
    "cpu_budget": ("SIZE", "KV bytes in host memory"),
    "disk_budget": ("SIZE", "bytes of the store on disk"),
    "disk_floor": ("SIZE", "free disk space never to be used"),
    "disk_writes_per_day": ("SIZE", "bytes of pages the store may write in a day (UTC)"),
    "store": ("DIR", "directory of the cold tier; without it there is none"),
    "page_tokens": ("N", "tokens per page, a power of two from 16 to 256"),
    "prefill_chunk": ("N", "prompt tokens per forward; 0 chooses"),
    "io_threads": ("N", "threads that read from disk"),
    "attention": ("MODE", "exact, or selective: decode over the pages that matter most"),
    "selector": ("NAME", "how selective attention ranks pages"),
    "token_budget": ("N", "tokens each KV head chooses in selective attention"),
    "mass": ("SHARE", "stop choosing at this share of the estimated attention"),
    "sink_tokens": ("N", "first tokens, always read"),
    "recent_tokens": ("N", "last tokens, always read"),
    "dense_layers": ("N", "first layers, which stay exact"),
    "on_cold_miss": ("MODE", "wait for chosen pages on disk, or skip them in this step"),
    "reuse": ("X", "reuse cache of selective attention, in token budgets"),
    "codec": (
        "NAME",
        "how pages are stored below hot: raw, int8, int4, ...; hot=int8: also in hot",
    ),
    "residual_tokens": ("N", "last tokens that are not encoded: their pages stay hot"),
    "cuda_graph": ("", "replay decode steps as a CUDA graph; by default where it can be done"),
    "look_ahead": ("N", "layers ahead for which selective attention foresees lookups; 0 for none"),
    "compile": ("", "run the model's layers through torch.compile in replayed steps"),
    "salt": ("TEXT", "pages saved under one text are not found under another"),
    "prefix_cache": ("", "begin new requests with pages of finished ones"),
    "max_context": ("N", "tokens to keep summaries for; 0 takes the model's limit"),
    "max_batch": ("N", "sequences that selective attention decodes together at most"),
    "model": ("DIR", "directory of a Hugging Face model, or smollm2"),
    "max_new_tokens": ("N", "tokens to generate at most"),
    "temperature": ("T", "sampling temperature; 0 is greedy"),
    "top_p": ("P", "share of the probability to sample from"),
    "seed": ("N", "seed for sampling"),
    "chat": ("", "use the model's chat template if it has one"),
    "device": ("NAME", "auto, cpu, cuda or cuda:N"),
    "dtype": ("NAME", "auto (as the model says) or a torch dtype"),
}
_CHOICES = {
    "dtype": DTYPES, "attention": ATTENTIONS, "selector": SELECTORS, "on_cold_miss": COLD_MISSES,
}  # fmt: skip
_FIELDS = (*fields(Config), *fields(GenerateConfig))


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and one flag for each setting; a flag not given stays out of the result."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
    for field in _FIELDS:
        metavar, text = _HELP[field.name]
        default = Setting(field.name, field.default, "").text
        options: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": f"{text} (default: {default})",
        }
        if isinstance(field.default, bool) or field.name == "cuda_graph":
            options["action"] = argparse.BooleanOptionalAction
        elif field.name in _CHOICES:
            options["choices"] = _CHOICES[field.name]
        elif field.name == "mass":
            options |= {"metavar": metavar, "type": float}
        else:
            options["metavar"] = metavar
            if type(field.default) in (int, float) and metavar != "SIZE":
                options["type"] = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``tierkv bench``; `tierkv.cli_bench` reads them."""
    add = parser.add_argument
    add("--shape", action="append", metavar="NAME[:TOKENS]",
        help="llama-3.1-8b, llama-3.2-1b, llama-3-70b, qwen2.5-7b-1m, tiny or a config.json, and "
        "its contexts; may be repeated (default: llama-3.1-8b, without a GPU tiny)")  # fmt: skip
    add("--tokens", metavar="N,N", help="contexts (default: 128K,256K,512K,1M)")
    add("--hot", default="1/8", metavar="SHARES",
        help="gpu_budget as shares of the KV, such as 1/8,1 (default: 1/8)")  # fmt: skip
    add("--codec", default="raw", metavar="NAMES",
        help="how pages are stored below hot, such as raw,int8,int4, or also in hot, such as "
        "hot=int8: one row each")  # fmt: skip
    add("--cpu-budget", metavar="SIZE", help="host memory for KV (default: all that is not hot)")
    add("--store", metavar="DIR", help="directory of the cold tier, for what fits neither")
    add("--prefill", nargs="?", const="128K", metavar="N",
        help="also prefill contexts up to N really (128K if N is left out)")  # fmt: skip
    add("--without", action="append", default=[], choices=("transformers", "offloaded"),
        help="leave out a baseline")  # fmt: skip
    add("--eager", action="store_true", help="do not replay tierkv's steps as CUDA graphs")
    add("--steps", type=int, default=0, metavar="N", help="decode steps (default: 64)")
    add("--limit-seconds", type=float, default=0.0, metavar="S",
        help="end a decode measurement early after this long (default: 20)")  # fmt: skip
    add("--page-tokens", type=int, default=32, metavar="N", help=_HELP["page_tokens"][1])
    add("--prefill-chunk", type=int, default=0, metavar="N", help=_HELP["prefill_chunk"][1])
    add("--device", default="auto", metavar="NAME", help=_HELP["device"][1])
    add("--dtype", default="auto", choices=DTYPES,
        help="auto is bfloat16 on a GPU and float32 without")  # fmt: skip
    add("--quick", action="store_true", help="one context and few steps: about a minute")
    add("--json", metavar="FILE", help="write the report there, after every row")
    add("--plots", metavar="DIR", help="write pictures there (needs matplotlib)")
    add("--report", metavar="FILE", help="print and draw an earlier --json FILE; measure nothing")
    add("--commit", metavar="HASH", help="what to record where there is no git checkout")


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``tierkv eval``; `tierkv.cli_eval` reads them."""
    add = parser.add_argument
    add("--model", default=os.environ.get("TIERKV_MODEL") or "smollm2", metavar="DIR",
        help=f"{_HELP['model'][1]} (default: smollm2)")  # fmt: skip
    add("--text", metavar="FILE", help="text to read (default: the bundled one)")
    add("--tokens", metavar="N", help="context (default: 4K, or what text and model allow)")
    add("--continuation", type=int, default=128, metavar="M",
        help="true tokens fed after the context; 0 for none (default: 128)")  # fmt: skip
    add("--needles", type=int, default=20, metavar="S",
        help="contexts with a needle to find; 0 for none (default: 20)")  # fmt: skip
    add("--selectors", metavar="NAMES",
        help=f"among {','.join(SELECTORS)} (default: cuboid, on a CPU oracle too)")  # fmt: skip
    add("--codecs", default="", metavar="NAMES", help=f"among {','.join(CODECS)}, or all")
    add("--budgets", default="256,512,1024", metavar="N,N",
        help="token budgets per KV head (default: 256,512,1024)")  # fmt: skip
    for name in ("gpu_budget", "cpu_budget", "store", "page_tokens", "prefill_chunk",
                 "sink_tokens", "recent_tokens", "dense_layers", "residual_tokens"):  # fmt: skip
        metavar, text = _HELP[name]
        kind = int if metavar == "N" else str
        add(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    add("--device", default="auto", metavar="NAME", help=_HELP["device"][1])
    add("--dtype", default="auto", choices=DTYPES,
        help="auto is as the model says on a GPU and float32 without")  # fmt: skip
    add("--json", metavar="FILE", help="write the report there, after every row")
    add(
        "--plot",
        metavar="FILE",
        help="draw quality against budget and bytes moved there (needs matplotlib)",
    )
    add("--commit", metavar="HASH", help="what to record where there is no git checkout")


def add_store_commands(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``tierkv store``; `tierkv.cli_store` runs them."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, *positional: str, json: bool = False) -> Any:
        one = actions.add_parser(name, help=text)
        for argument in positional:
            one.add_argument(argument.lower(), metavar=argument)
        one.add_argument("--store", metavar="DIR", help="directory of the cold tier")
        if json:
            one.add_argument("--json", action="store_true", help="print one JSON object instead")
        one.set_defaults(run=_store)
        return one.add_argument

    action("ls", "list saved contexts", json=True)
    add = action("inspect", "show what is kept of a saved context", "NAME", json=True)
    add("--model", metavar="DIR", help="show its first and last text by this model's tokenizer")
    add = action("verify", "read every record and report bad ones", json=True)
    add("--repair", action="store_true", help="drop the bad ones")
    add = action("gc", "drop pages that no context names, then old contexts if asked", json=True)
    add("--max-bytes", metavar="SIZE", help="come down to this, least recently used first")
    add("--older-than", metavar="AGE", help="only contexts not used for 12h, 7d, 2w ...")
    add("--include-saved", action="store_true", help="saved contexts may go too")
    add("--compact", action="store_true",
        help="move pages to the front of their files, so that these shrink (writes)")  # fmt: skip
    action("rm", "delete a saved context and the pages that only it uses", "NAME")
    add = action("export", "write a saved context to one file", "NAME", "FILE")
    add("--force", action="store_true", help="replace the file")
    add = action("import", "store the context of an exported file (one you trust)", "FILE")
    add("--name", metavar="NAME", help="save it under this name (default: the one in the file)")
    add("--force", action="store_true", help="replace a context of that name")
    add("--disk-budget", default=format_bytes(Config().disk_budget), metavar="SIZE",
        help=f"{_HELP['disk_budget'][1]} (default: %(default)s)")  # fmt: skip
    why = actions.add_parser("explain", help="say which pages of a prompt are stored, or why not")
    add_prompt_flags(why)
    add_setting_flags(why)
    why.add_argument("--json", action="store_true", help="print one JSON object instead")
    why.set_defaults(run=_explain)


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what the model is to read."""
    parser.add_argument(
        "--prompt-file", metavar="FILE", help="document to read; - is standard input"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="the prompt, put after the document if there is one"
    )


def settings_from(args: argparse.Namespace) -> Settings:
    """Return the effective settings of parsed flags, their ``--config`` file and the environment.

    Raises:
        ConfigError: see `tierkv.config.load_settings`.
    """
    names = {field.name for field in _FIELDS}
    flags = {name: value for name, value in vars(args).items() if name in names}
    return load_settings(args.config, flags, os.environ)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tierkv",
        description="Run a Hugging Face model on a context whose KV cache does not fit its GPU.",
    )
    parser.add_argument("--version", action="version", version=f"tierkv {tierkv.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="read a prompt, stream an answer")
    add_prompt_flags(generate)
    add_setting_flags(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")
    generate.add_argument(
        "--save", metavar="NAME", help="keep prompt and answer in the store under this name"
    )
    generate.add_argument(
        "--resume", metavar="NAME", help="start from a saved context: only what differs is computed"
    )
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model, a line at a time; /help inside")
    chat.add_argument("--name", metavar="NAME", help="chat to go on with, or to begin and keep")
    chat.add_argument("--system", metavar="TEXT", help="system message of a new chat")
    add_setting_flags(chat)
    chat.set_defaults(run=_chat)

    doctor = commands.add_parser("doctor", help="check this machine and the installation")
    doctor.add_argument("--store", metavar="DIR", help="directory to check for the cold tier")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    doctor.set_defaults(run=_doctor)

    add_store_commands(commands.add_parser("store", help="look after what a store keeps"))

    bench = commands.add_parser("bench", help="measure decode and prefill with KV off the GPU")
    add_bench_flags(bench)
    bench.set_defaults(run=_bench)

    quality = commands.add_parser("eval", help="compare selective attention with exact")
    add_eval_flags(quality)
    quality.set_defaults(run=_eval)

    config = commands.add_parser("config", help="show the effective settings")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print every setting and where it came from")
    add_setting_flags(show)
    show.set_defaults(run=_config_show)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = make_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except TierKVError as error:
        if os.environ.get("TIERKV_DEBUG") == "1":
            raise
        print(f"tierkv: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tierkv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`tierkv ... | head`); keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _generate(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    from tierkv.cli_generate import generate  # torch and transformers, only when needed

    return generate(
        settings, args.prompt_file, args.prompt, as_json=args.json, save=args.save,
        resume=args.resume,
    )  # fmt: skip


def _chat(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    from tierkv.cli_chat import chat  # torch and transformers, only when needed

    return chat(settings, args.name, args.system)


def _bench(args: argparse.Namespace) -> int:
    from tierkv.cli_bench import bench  # torch and transformers, only when needed

    return bench(args)


def _eval(args: argparse.Namespace) -> int:
    from tierkv.cli_eval import evaluate  # torch and transformers, only when needed

    return evaluate(args)


def _store(args: argparse.Namespace) -> int:
    from tierkv.cli_store import store  # torch, only when needed

    return store(args)


def _explain(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    from tierkv.cli_explain import explain_store  # torch and transformers, only when needed

    return explain_store(args, settings)


def _doctor(args: argparse.Namespace) -> int:
    from tierkv.doctor import doctor  # torch, only when needed

    store = args.store or os.environ.get("TIERKV_STORE") or None
    return doctor(store, as_json=args.json)


def _config_show(args: argparse.Namespace) -> int:
    rows = [*settings_from(args).rows(), converted_dir(os.environ)]
    widths = [max(len(row.name) for row in rows), max(len(row.text) for row in rows)]
    for row in rows:
        print(f"{row.name:<{widths[0]}}  {row.text:<{widths[1]}}  {row.origin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
