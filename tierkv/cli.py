"""The command ``tierkv``: parse, call the API, print.

``generate`` and ``config show`` live here and in `tierkv.cli_generate`; ``doctor`` is
`tierkv.doctor`. Exit codes: 0 done, 1 ``doctor`` found something broken, 2 an error (one line on
stderr; TIERKV_DEBUG=1 shows the traceback), 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tierkv
from tierkv.config import (
    ATTENTIONS,
    CODECS,
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

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

_HELP = {
    "gpu_budget": ("SIZE", "KV bytes on the compute device"),
    "cpu_budget": ("SIZE", "KV bytes in host memory"),
    "disk_budget": ("SIZE", "bytes of the store on disk"),
    "disk_floor": ("SIZE", "free disk space never to be used"),
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
    "reuse": ("X", "reuse cache of selective attention, in token budgets"),
    "codec": ("NAME", "how pages are stored below hot: raw, int8, int8-channel, int4, ..."),
    "cuda_graph": ("", "replay decode steps as a CUDA graph; selective attention does anyway"),
    "max_context": ("N", "tokens to keep summaries for; 0 takes the model's limit"),
    "model": ("DIR", "directory of a Hugging Face model, or smollm2"),
    "max_new_tokens": ("N", "tokens to generate at most"),
    "temperature": ("T", "sampling temperature; 0 is greedy"),
    "top_p": ("P", "share of the probability to sample from"),
    "seed": ("N", "seed for sampling"),
    "chat": ("", "use the model's chat template if it has one"),
    "device": ("NAME", "auto, cpu, cuda or cuda:N"),
    "dtype": ("NAME", "auto (as the model says) or a torch dtype"),
}
_CHOICES = {"dtype": DTYPES, "attention": ATTENTIONS, "selector": SELECTORS}
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
        help="how pages are stored below hot, such as raw,int8,int4: one row each")  # fmt: skip
    add("--cpu-budget", metavar="SIZE", help="host memory for KV (default: all that is not hot)")
    add("--store", metavar="DIR", help="directory of the cold tier, for what fits neither")
    add("--prefill", nargs="?", const="128K", metavar="N",
        help="also prefill contexts up to N really (128K if N is left out)")  # fmt: skip
    add("--without", action="append", default=[], choices=("transformers", "offloaded"),
        help="leave out a baseline")  # fmt: skip
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
        help=f"among {','.join(SELECTORS)} (default: cuboid; none with --codecs)")  # fmt: skip
    add("--codecs", default="", metavar="NAMES", help=f"among {','.join(CODECS)}, or all")
    add("--budgets", default="256,512,1024", metavar="N,N",
        help="token budgets per KV head (default: 256,512,1024)")  # fmt: skip
    for name in ("gpu_budget", "cpu_budget", "store", "page_tokens", "prefill_chunk",
                 "sink_tokens", "recent_tokens", "dense_layers"):  # fmt: skip
        metavar, text = _HELP[name]
        kind = int if metavar == "N" else str
        add(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    add("--device", default="auto", metavar="NAME", help=_HELP["device"][1])
    add("--dtype", default="auto", choices=DTYPES,
        help="auto is as the model says on a GPU and float32 without")  # fmt: skip
    add("--json", metavar="FILE", help="write the report there, after every row")
    add("--plot", metavar="FILE", help="draw quality against budget there (needs matplotlib)")
    add("--commit", metavar="HASH", help="what to record where there is no git checkout")


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
    generate.add_argument(
        "--prompt-file", metavar="FILE", help="document to read; - is standard input"
    )
    generate.add_argument(
        "--prompt", metavar="TEXT", help="the prompt, put after the document if there is one"
    )
    add_setting_flags(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")
    generate.add_argument(
        "--save", metavar="NAME", help="keep prompt and answer in the store under this name"
    )
    generate.add_argument(
        "--resume", metavar="NAME", help="start from a saved context: only what differs is computed"
    )
    generate.set_defaults(run=_generate)

    doctor = commands.add_parser("doctor", help="check this machine and the installation")
    doctor.add_argument("--store", metavar="DIR", help="directory to check for the cold tier")
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")
    doctor.set_defaults(run=_doctor)

    store = commands.add_parser("store", help="list, check and delete what a store keeps")
    kept = store.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("ls", "list saved contexts"), ("verify", "read every page and report bad ones"),
        ("rm", "delete a saved context and the pages that only it uses"),
    ):  # fmt: skip
        one = kept.add_parser(action, help=text)
        if action == "rm":
            one.add_argument("name", metavar="NAME")
        else:
            one.add_argument("--json", action="store_true", help="print one JSON object instead")
        one.add_argument("--store", metavar="DIR", help="directory of the cold tier")
        one.set_defaults(run=_store)

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


def _bench(args: argparse.Namespace) -> int:
    from tierkv.cli_bench import bench  # torch and transformers, only when needed

    return bench(args)


def _eval(args: argparse.Namespace) -> int:
    from tierkv.cli_eval import evaluate  # torch and transformers, only when needed

    return evaluate(args)


def _store(args: argparse.Namespace) -> int:
    from tierkv.cli_store import store  # torch, only when needed

    return store(args)


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
