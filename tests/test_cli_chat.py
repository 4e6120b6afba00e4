"""``tierkv chat`` on piped lines: what it says where, its commands, Ctrl-C, and what it keeps."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.hf.test_conversation import CHATML
from tierkv import cli_chat
from tierkv.cli import main
from tierkv.cli_stream import StopFlag, TokenStream
from tierkv.hf.breakeven import Rates

Chat = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture(scope="module")
def chat_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template, which never says what only the template says."""
    directory = tmp_path_factory.mktemp("tiny-chat") / "model"
    shutil.copytree(tiny_model_dir, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    config = GenerationConfig.from_pretrained(directory)
    config.suppress_tokens = [0, 1, 2]
    config.save_pretrained(directory)
    return directory


@pytest.fixture
def chat(
    chat_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Chat:
    """Run ``tierkv chat`` on lines; returns (exit code, stdout, lines of stderr)."""

    class Stdin(io.TextIOWrapper):
        terminal = False

        def isatty(self) -> bool:
            return self.terminal

    def run(
        lines: str, *flags: str, new: int = 8, terminal: bool = False
    ) -> tuple[int, str, list[str]]:
        stdin = Stdin(io.BytesIO(lines.encode()), encoding="ascii")
        stdin.terminal = terminal
        monkeypatch.setattr(sys, "stdin", stdin)
        code = main(["chat", "--model", str(chat_model_dir), "--device", "cpu", "--page-tokens",
                     "16", "--max-new-tokens", str(new), *flags])  # fmt: skip
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run


def turns(err: list[str]) -> list[tuple[int, int, int]]:
    """(reused, computed, generated) tokens of each turn that was reported."""
    pattern = r"\[reused ([\d,]+) tokens.*, computed ([\d,]+).*, generated ([\d,]+)"
    found = [re.match(pattern, line) for line in err]
    return [tuple(int(x.replace(",", "")) for x in m.groups()) for m in found if m]  # type: ignore[misc]


def test_twenty_turns(chat: Chat) -> None:
    """Each turn computes what is new and nothing else: the counters add up to one prompt."""
    code, out, err = chat("".join(f"Question {i}, ünd?\n" for i in range(20)))
    assert code == 0
    done = turns(err)
    assert len(done) == 20
    for (reused, computed, generated), (again, _, _) in itertools.pairwise(done):
        assert again == reused + computed + generated - 1
    new = len("</s>\n<s>user\nQuestion 11, ünd?</s>\n<s>assistant\n".encode()) - 10 + 1
    assert {computed for _, computed, _ in done[11:]} == {new}
    assert len(out.splitlines()) >= 20
    assert all("hot" in line for line in err[1:])


def test_fork_edit_switch_and_list(chat: Chat, tmp_path: Path) -> None:
    lines = ("One\n/fork other\nTwo\n/edit Three\n/list\n/switch main\nFour\n/save\n/stats\n"
             "/help\n//slash\n/quit\nnever\n")  # fmt: skip
    code, _, err = chat(lines, "--store", str(tmp_path), "--name", "main")
    assert code == 0
    assert "[now in 'other'; it shares" in "\n".join(err)
    first, two, three, four, _ = turns(err)
    shared = sum(first) - 1
    assert two[0] == four[0] == shared
    assert three[0] == shared + 1 + len("</s>\n<s>user\nT") - 5
    assert three[1] < len("<s>user\nThree</s>\n<s>assistant\n")
    assert "were dropped" in "\n".join(err)
    listed = [line for line in err if " messages" in line]
    assert listed[0].split()[:2] == ["main", str(sum(first))]
    assert listed[1].split()[:2] == ["*", "other"]
    text = "\n".join(err)
    for word in ("cold", "tokens prefilled in 4 turns", "/switch NAME"):
        assert word in text
    assert [line.split(":")[0] for line in err if line.startswith("[saved")] == [
        "[saved 'main'", "[saved 'main'", "[saved 'other'",
    ]  # fmt: skip


def test_it_goes_on_in_a_new_process(
    chat: Chat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if it had never been left: the same answer, and only the new question is computed."""
    place = ["--store", str(tmp_path), "--system", "Be brief."]
    _, out, err = chat("One\nTwo\n", *place)
    _, first, _ = chat("One\n", *place, "--name", "talk")
    code, second, again = chat("Two\n", *place, "--name", "talk")
    assert code == 0
    assert first + second == out
    assert turns(again) == turns(err)[1:]
    held = sum(turns(err)[0]) - 1
    assert again[0] == f"['talk': 3 messages, {held} tokens read from the store]"
    assert main(["store", "inspect", "talk", "--store", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == 5
    code, _, err = chat("/switch nobody\n/fork talk\n/save\n", *place)
    assert code == 2
    assert [line.split(";")[0] for line in err] == [
        "tierkv: error: no chat 'nobody'",
        "tierkv: error: there is a context 'talk' already",
        "tierkv: error: this chat has no name: /save NAME",
    ]


def test_mistakes_do_not_end_it(chat: Chat, tmp_path: Path) -> None:
    code, _, err = chat("/edit x\n/nonsense\n/fork\n/save x\nOne\n/edit\n")
    assert code == 2
    assert len(turns(err)) == 1
    for message in ("no message to edit", "no command /nonsense", "/fork needs a name",
                    "need a store", "/edit needs the new text"):  # fmt: skip
        assert any(message in line for line in err), message
    code, _, err = chat("One\n", "--name", "x")
    assert (code, err) == (2, [
        "tierkv: error: saving and resuming need a store; set store (--store DIR)"
    ])  # fmt: skip


def test_a_save_that_is_refused_at_the_end_is_told(chat: Chat, tmp_path: Path) -> None:
    flags = ["--store", str(tmp_path), "--name", "talk", "--disk-writes-per-day", "4KiB"]
    code, out, err = chat("One\n", *flags)
    assert code == 2
    assert out, "the answer came"
    assert "disk_writes_per_day is 4 KiB" in err[-1]
    assert err[-1].endswith("('talk' is not saved)")


def test_ctrl_c_stops_the_answer_not_the_program(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = TokenStream.put, []

    def put(self: TokenStream, tokens: Any) -> None:
        real(self, tokens)
        if len(self._run.token_ids) == 3 and not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TokenStream, "put", put)
    former = signal.getsignal(signal.SIGINT)
    code, _, err = chat("One\nTwo\n")
    assert code == 0
    first, second = turns(err)
    assert first[2] in (3, 4)
    assert any(line.endswith("; stopped]") for line in err)
    assert second[0] == sum(first) - 1, "what was said until then stays in the context"
    assert second[2] == 8
    assert signal.getsignal(signal.SIGINT) is former


def test_on_a_terminal(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the prompt says how to leave; Ctrl-D leaves."""
    typed = iter(["One", KeyboardInterrupt, "", "/nonsense", "Two", EOFError])

    def answer(prompt: str) -> str:
        assert prompt == cli_chat.PROMPT
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", answer)
    code, _, err = chat("", terminal=True)
    assert code == 0, "mistakes of a person are no failure of the program"
    assert len(turns(err)) == 2
    assert "(/quit or Ctrl-D leaves)" in err


def test_ctrl_c_before_the_answer_takes_the_message_back(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sent = StopFlag.check, []

    def check(self: StopFlag) -> None:
        if not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        real(self)

    monkeypatch.setattr(StopFlag, "check", check)
    code, _, err = chat(f"{'long ' * 30}\nOne\n/list\n", "--prefill-chunk", "32")
    assert code == 0
    assert "[stopped before the answer began; the message was taken back]" in err
    (only,) = turns(err)
    assert only[1] == len("<s>user\nOne</s>\n<s>assistant\n") - 2 - 3 - 2
    assert err[-1].endswith(" 2 messages")


def test_second_ctrl_c_ends_the_program_and_what_was_said_is_saved(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TokenStream.put

    def put(self: TokenStream, tokens: Any) -> None:
        real(self, tokens)
        if len(self._run.token_ids) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    place = ["--store", str(tmp_path), "--name", "talk"]
    assert chat("One\n", *place)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(TokenStream, "put", put)
        code, _, err = chat("Two\nnever\n", *place)
    assert code == 130
    assert err[-1] == "tierkv: interrupted"
    code, _, err = chat("Three\n", *place)
    assert code == 0
    assert err[0].startswith("['talk': 2 messages"), "the message without an answer is gone"


def test_a_chat_that_is_computed_again_says_so(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has its messages all the same."""
    place = ["--store", str(tmp_path), "--name", "talk"]
    _, _, err = chat("One\n", *place)
    held = sum(turns(err)[0]) - 1
    monkeypatch.setattr(Rates, "verdict", lambda *_: "the disk is slow")
    _, _, err = chat("Two\n", *place)
    assert err[0] == f"['talk': 2 messages, {held} tokens computed again: the disk is slow]"
    assert turns(err)[0][0] == held
