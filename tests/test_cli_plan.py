# SPDX-License-Identifier: Apache-2.0
"""``sparsemla plan``: the published figures, JSON keys, refusals as one line, the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsemla.cli import UserError
from sparsemla.cli.app import main
from sparsemla.cli.plan import human_bytes, parse_bytes
from sparsemla.serving.config import PRESETS


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


LINE = ["plan", "--model", "glm-5.3", "--tp", "4", "--dcp", "4", "--max-model-len", "786432"]
LINE += ["--max-num-batched-tokens", "8192", "--max-num-seqs", "32", "--spec-tokens", "3", "--cache-format"]
LINE += ["fp8_ds_mla"]
MEMORY = ["--gpu-memory-bytes", "150754820096", "--utilization", "0.945", "--weights-bytes", "123600000000"]
OTHER = ["--other-workspace-bytes", "1745879040"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def test_flashmla(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, *LINE, "--policy", "flashmla")
    assert (data["policy"], data["path"]) == ("flashmla", "mixed_fp8")
    assert data["workspace"]["total_bytes"] == 3_238_002_688
    items = {item["name"]: item for item in data["workspace"]["reservations"]}
    assert items["prefill_kv"] == {
        "name": "prefill_kv",
        "shape": [1_572_864, 576],
        "dtype": "bfloat16",
        "bytes": 1_811_939_328,
        "read_by": "nobody",
        "ever_read": False,
    }
    assert [item["ever_read"] for item in items.values()].count(False) == 1
    assert data["kv"]["bytes_per_token_per_rank"] == 13_682
    assert data["kv"]["tokens"] is None
    assert "compare" not in data


def test_gated_with_other_users(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, *LINE, *OTHER, "--policy", "flashmla-gated")
    assert data["workspace"]["total_bytes"] == 1_745_879_040
    assert data["workspace"]["decided_by"] == "other users"


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, *LINE, *OTHER, "--compare", "flashmla,flashmla-gated")
    assert data["policy"] == "flashmla"
    assert data["compare"]["bytes_saved"] == 1_492_123_648
    assert data["compare"]["kv_tokens_gained"] == 109_056
    with_memory = run_json(capsys, *LINE, *OTHER, *MEMORY, "--compare", "flashmla,flashmla-gated")
    assert with_memory["compare"]["kv_tokens_gained"] == 109_056
    assert with_memory["kv"]["tokens"] == 1_142_016
    assert with_memory["compare"]["after"]["kv_tokens"] == 1_251_072


ONE_CACHE = [*LINE[:5], *LINE[7:]]
"""LINE without --dcp 4: nothing travels between ranks."""


def test_sparsemla_is_the_default_and_reserves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, *ONE_CACHE)
    assert data["policy"] == "sparsemla"
    assert data["workspace"]["total_bytes"] == data["workspace"]["attention_bytes"] == 0
    assert data["workspace"]["reservations"] == []


def test_what_travels_between_ranks_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = (run_json(capsys, *LINE, "--policy", policy)["workspace"] for policy in ("sparsemla", "flashmla"))
    assert {item["name"] for item in ours["reservations"]} == {"exchange_received", "exchange_sent", "exchange_lse"}
    assert all(item["ever_read"] for item in ours["reservations"])
    assert (ours["exchange_bytes_outside"], theirs["exchange_bytes_outside"]) == (0, 1_218_445_312)
    split = run_json(capsys, *LINE, "--pcp", "4")["workspace"]  # the 4 dcp ranks are the pcp ranks
    assert {item["name"] for item in split["reservations"]} == {"exchange_lse", "gathered_records"}
    assert split["users"][1]["name"] == "new records of pcp ranks"


def test_deepseek_v32(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "plan", "--model", "deepseek-v3.2", "--max-model-len", "163840", "--policy", "flashmla")
    assert {i["name"]: i["bytes"] for i in data["workspace"]["reservations"]}["prefill_kv"] == 943_718_400


def test_config_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PRESETS["glm-5.3"][0]), encoding="utf-8")
    data = run_json(capsys, "plan", "--model", str(file), *LINE[3:], "--policy", "flashmla")
    assert data["workspace"]["total_bytes"] == 3_238_002_688


@pytest.mark.parametrize("model", sorted(PRESETS))
def test_every_preset_plans_at_its_full_length(capsys: pytest.CaptureFixture[str], model: str) -> None:
    data = run_json(capsys, "plan", "--model", model, "--kv-bytes", "100GiB")
    assert data["kv"]["tokens"] > data["limits"]["max_model_len"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "glm-5.3", "--tp", "5"], "tp: got 5, which does not divide the 64 heads of glm-5.3"),
        (["--model", "glm-5.3", "--tp", "4", "--dcp", "3"], "dcp: got 3, which does not divide tp 4"),
        (["--model", "nothing"], "model: got 'nothing'"),
        (["--model", "glm-5.3", "--policy", "best"], "policy: got 'best'"),
        (["--model", "glm-5.3", "--compare", "flashmla"], "--compare: got 'flashmla'"),
        (["--model", "glm-5.3", "--gpu-memory-bytes", "140GiB"], "--gpu-memory-bytes and --weights-bytes"),
        (["--model", "glm-5.3", "--kv-bytes", "lots"], "bytes: got 'lots'"),
        (["--model", "glm-5.3", "--kv-bytes", "1GiB"], "one request of 1,048,576 tokens takes"),
        (["--model", "glm-5.3", "--cache-format", "fp16"], "format: got 'fp16'"),
        (["--model", "glm-5.3", "--arch", "sm80"], "arch: got 'sm80'"),
        (["--model", "glm-5.3", "--tp", "1000000000001", "--dcp", "3"], "dcp: got 3, which does not divide tp 1000"),
        (["--model", "glm-5.3", "--max-model-len", "9" * 400], "max_model_len: got more than 2^40"),
        (["--model", "glm-5.3", "--kv-bytes", "9" * 400], "bytes: got a number of 400 characters"),
        (["--model", "glm-5.3", "--kv-bytes", "9" * 400 + ".5GiB"], "accepted are at most 18 digits"),
        (["--model", "glm-5.3", "--spec-tokens", "8192"], "spec_tokens: got 8192, accepted is at most"),
        (["--model", "glm-5.3", "--activation-bytes", "much"], "bytes: got 'much'"),
        (["--model", "glm-5.3", "--activation-bytes", "1GiB"], "--activation-bytes: needs --gpu-memory-bytes"),
        (["--model", "deepseek-v4", "--policy", "flashmla"], "does not serve cache format fp8_v4"),
        (
            ["--model", "glm-5.3", "--gpu-memory-bytes", "140GiB", "--weights-bytes", "139GiB"],
            "are left; accepted is up to 0 tokens",
        ),
        ([], "--model"),
    ],
)
def test_the_impossible_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, "plan", *arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_nextn_predict_layers": [1]}, "num_nextn_predict_layers in config.json is [1], accepted is an integer"),
        ({"num_nextn_predict_layers": float("inf")}, "num_nextn_predict_layers in config.json is inf"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000, accepted are 1 to"),
        ({"num_attention_heads": 10**13}, "heads: got more than 2^40"),
        ({"num_attention_heads": 256}, "tp: got 1, which leaves a rank 256 heads"),
        ({"indexer_types": 5}, "indexer_types in config.json is 5, accepted is a list"),
        ({"index_topk_pattern": 5}, "index_topk_pattern in config.json is 5, accepted is a list"),
        ({"index_topk_pattern": [{}] * 78}, "index_topk_pattern: got 78 entries"),
        ({"index_topk_freq": [1]}, "index_topk_freq in config.json is [1]"),
        ({"index_topk_freq": 0}, "index_topk_freq in config.json is 0, accepted is an integer of at least 1"),
        ({"index_kpool": -2}, "index_kpool in config.json is -2"),
        ({"index_n_heads": {}}, "index_n_heads in config.json is {}"),
        ({"compress_ratios": [[0]] * 79, "head_dim": 512}, "compress_ratios: got [[0]]"),
        ({"compress_ratios": ["4", 3] * 40, "head_dim": 512}, "compress_ratios: got ['4', 3]"),
        ({"compress_ratios": [4] * 79, "head_dim": 512, "sliding_window": 0}, "sliding_window 0, accepted is"),
        ({"model_type": "deepseek_v4", "head_dim": 512, "layer_types": [[]] * 78}, "neither compress_ratios nor"),
    ],
)
def test_a_config_json_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, object], words: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PRESETS["glm-5.3"][0] | change), encoding="utf-8")
    assert words in refused(capsys, "plan", "--model", str(file))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"index_topk": ' + "9" * 5000 + "}", "[]", ""])
def test_a_file_that_is_no_config_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    assert str(file) in refused(capsys, "plan", "--model", str(file))


def test_text_names_what_is_never_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *OTHER, *MEMORY, "--policy", "flashmla", "--compare", "flashmla,sparsemla"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "prefill_kv",
        "nobody, ever",
        "3,238,002,688 bytes",
        "never read: 1,811,939,328 bytes",
        "13,682",
        "1,142,016 in 4,461 pages of 256 tokens",
        "2,151,677,952 bytes",
        "1,492,123,648 bytes",
        "109,056 KV tokens",
    ):
        assert expected in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_text_of_a_plan_without_reservations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE_CACHE]) == 0
    text = capsys.readouterr().out
    assert "0 bytes: attention reserves nothing" in text and "tokens: unknown without" in text


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "map.png"
    assert main([*LINE, *OTHER, *MEMORY, "--compare", "flashmla,sparsemla", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main([*LINE, "--plot", str(tmp_path / "bare.svg")]) == 0
    capsys.readouterr()
    assert "accepted are files ending in" in refused(capsys, *LINE, "--plot", str(tmp_path / "map.doc"))
    assert "does not exist" in refused(capsys, *LINE, "--plot", str(tmp_path / "no" / "map.png"))


def test_byte_figures() -> None:
    assert parse_bytes("1_000") == 1000 and parse_bytes("1.5 GiB") == 3 << 29 and parse_bytes("2kb") == 2000
    for bad in ("", "1.5", "GiB", "-1", "1 XB"):
        with pytest.raises(UserError):
            parse_bytes(bad)
    assert [human_bytes(n) for n in (0, 1023, 1811939328, -2048, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.69 GiB",
        "-2.00 KiB",
        "5.00 TiB",
    ]
