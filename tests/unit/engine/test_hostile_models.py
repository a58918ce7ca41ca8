"""Malicious model directories: each ends with one error that names file and field, in bounded memory and time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source_tree import ROOT

MODELS = ROOT / "deploy" / "tiny_models"
Damage = Callable[[Path], object]
HUGE = 10**18


@dataclass(frozen=True)
class Case:
    """One false claim. `said`: words of the error, the file's name first."""

    name: str
    damage: Damage
    said: tuple[str, ...]
    readers: tuple[str, ...] = ("router", "node")
    model: str = "tiny-standalone"


def text(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda path: (path / name).write_bytes(data)


def sparse(name: str, size: int) -> Damage:
    def damage(path: Path) -> None:
        (path / name).touch()
        os.truncate(path / name, size)

    return damage


def link(name: str, target: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return damage


def fields(name: str, part: str | None = None, **changes: Any) -> Damage:
    """Change fields of a JSON object, or of the object `part` in it."""

    def damage(path: Path) -> None:
        whole = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (whole if part is None else whole.setdefault(part, {})).update(changes)
        (path / name).write_text(json.dumps(whole))

    return damage


def header(change: Callable[[dict[str, Any]], object], pad: bytes = b"") -> Damage:
    """Rewrite the header of model.safetensors; the data are kept."""

    def damage(path: Path) -> None:
        file = path / "model.safetensors"
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        new = change(found)
        raw = new if isinstance(new, bytes) else json.dumps(found).encode()
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :] + pad)

    return damage


def index(**weight_map: str) -> Damage:
    return text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


NORM = "model.norm.weight"
CONFIG_FIELDS = [
    ("num_hidden_layers", 1_000_000_000),
    ("num_hidden_layers", 1024),  # within bounds, but far beyond what the files contain
    ("hidden_size", 1 << 40),
    ("hidden_size", 1 << 18),
    ("vocab_size", 10**12),
    ("vocab_size", 1 << 24),
    ("intermediate_size", 1 << 60),
    ("num_attention_heads", 10**9),
    ("num_key_value_heads", 10**30),
    ("head_dim", 1 << 40),
    ("max_position_embeddings", HUGE),
    ("rms_norm_eps", 10**400),
    ("rope_scaling", {"rope_type": "yarn", "factor": 1e300}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1e300}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "attention_factor": "x" * 100_000}),
    (
        "rope_scaling",
        {"rope_type": "yarn", "factor": 4.0, "mscale": [], "mscale_all_dim": 1, "beta_fast": 1e308},
    ),
    ("rope_scaling", [1, 2]),
    ("rope_parameters", {"rope_theta": 1.0}),
    ("rope_parameters", {"rope_theta": 10**400}),
    ("torch_dtype", {"a": 1}),
    ("quantization_config", {"quant_method": "y" * 1_000_000}),
]
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 8,
}
SHAPES: list[tuple[Any, str]] = [
    ({"shape": [float("inf")]}, "not valid JSON"),
    ({"shape": [1 << 62, 1 << 62]}, "shape"),
    ({"shape": [-128]}, "shape"),
    ({"shape": [1] * 9}, "shape"),
    ({"shape": "128"}, "shape"),
    ({"shape": [129]}, "shape"),
    ({"dtype": "F64"}, "shape"),
    ({"dtype": "Q9"}, "dtype"),
    ({"dtype": ["F32"]}, "dtype"),
    ({"data_offsets": [256, 0]}, "data_offsets"),
    ({"data_offsets": [0, 256]}, "data_offsets"),
    ({"data_offsets": [10**9, 10**9 + 256]}, "data_offsets"),
    ({"data_offsets": [1 << 70, (1 << 70) + 256]}, "data_offsets"),
    ({"data_offsets": [0]}, "data_offsets"),
    ({"data_offsets": None}, "data_offsets"),
    ({"more": 1}, "exactly dtype, shape and data_offsets"),
]
WEIGHTS = ("model.safetensors",)


def update(change: dict[str, Any], found: dict[str, Any]) -> None:
    found[NORM].update(change)


CASES = [
    *(
        Case(f"config-{key}-{number}", fields("config.json", None, **{key: value}), ("config.json", key))
        for number, (key, value) in enumerate(CONFIG_FIELDS)
    ),
    Case(
        "windows", fields("config.json", **QWEN, max_window_layers="a"), ("config.json", "max_window_layers")
    ),
    Case("layers", fields("config.json", **QWEN, layer_types=[[]] * 2), ("config.json", "layer_types")),
    Case("config-deep", text("config.json", "[" * 100_000), ("config.json", "nested")),
    Case("config-many", text("config.json", "[" + "[]," * 1_300_000 + "0]"), ("config.json", "values")),
    Case("config-sparse", sparse("config.json", 1 << 40), ("config.json", "bytes")),
    Case("config-nan", text("config.json", '{"hidden_size": NaN}'), ("config.json", "NaN")),
    Case(
        "config-digits",
        text("config.json", '{"a": ' + "9" * 100_000 + "}"),
        ("config.json", "not valid JSON"),
    ),
    Case("config-latin", text("config.json", b'{"a": "\xff"}'), ("config.json", "not valid JSON")),
    Case("config-list", text("config.json", "[]"), ("config.json", "not a JSON object")),
    Case("config-link", link("config.json", "/etc/passwd"), ("config.json", "outside the model directory")),
    Case("config-loop", link("config.json", "config.json"), ("config.json",)),
    Case(
        "config-pipe",
        lambda path: ((path / "config.json").unlink(), os.mkfifo(path / "config.json")),
        ("regular",),
    ),
    Case(
        "generation",
        fields("generation_config.json", temperature=10**400),
        ("generation_config", "temperature"),
    ),
    Case(
        "generation-deep",
        text("generation_config.json", '{"a":' * 9999),
        ("generation_config.json", "nested"),
    ),
    *(
        Case(f"tensor-{number}", header(partial(update, change)), (*WEIGHTS, said))
        for number, (change, said) in enumerate(SHAPES)
    ),
    Case("metadata", header(lambda found: found.update(__metadata__={"a": [8]})), (*WEIGHTS, "__metadata__")),
    Case("tensor-none", header(lambda found: found.update({NORM: None})), (*WEIGHTS, NORM)),
    Case(
        "tensor-twice",
        header(lambda found: json.dumps(found).encode()[:-1] + b', "x": {}, "x": {}}'),
        (*WEIGHTS, "'x'", "twice"),
    ),
    Case(
        "tensor-hole", header(lambda found: found.pop("lm_head.weight")), (*WEIGHTS, "data_offsets", "hole")
    ),
    Case("data-past-the-end", header(lambda found: None, pad=b"\0" * 64), (*WEIGHTS, "truncated or corrupt")),
    Case("header-deep", header(lambda found: b'{"a":' + b"[" * 1_000_000), (*WEIGHTS, "header", "nested")),
    Case(
        "header-many", header(lambda found: b"{" + b'"a":[],' * 2_000_000 + b'"b":0}'), (*WEIGHTS, "values")
    ),
    Case("header-text", header(lambda found: b"\x80\x04" * 8), (*WEIGHTS, "corrupt")),
    Case("header-length", text("model.safetensors", b"\xff" * 8 + b"{}"), (*WEIGHTS, "cut off or corrupt")),
    Case(
        "header-huge",
        lambda path: (
            (path / WEIGHTS[0]).write_bytes((1 << 30).to_bytes(8, "little")),
            sparse(WEIGHTS[0], 1 << 40)(path),
        ),
        (*WEIGHTS, "header of 1073741824 bytes"),
    ),
    Case("weights-empty", text("model.safetensors", b""), (*WEIGHTS, "cut off or corrupt")),
    Case("weights-link", link("model.safetensors", "/dev/zero"), ("found no weights",)),
    Case(
        "weights-outside", link("model.safetensors", "/etc/passwd"), (*WEIGHTS, "outside the model directory")
    ),
    Case("index-parent", index(a="../x.safetensors"), ("index.json", "'../x.safetensors'")),
    Case("index-root", index(a="/etc/x.safetensors"), ("index.json", "'/etc/x.safetensors'")),
    Case("index-missing", index(a="x.safetensors"), ("index.json", "x.safetensors")),
    Case(
        "index-types",
        text("model.safetensors.index.json", '{"weight_map": {"a": [1]}}'),
        ("index.json", "weight_map"),
    ),
    Case(
        "index-deep",
        text("model.safetensors.index.json", '{"weight_map": {"a": ' + "[" * 5000),
        ("index.json", "nested"),
    ),
    Case(
        "index-files",
        index(**{str(n): f"{n}.safetensors" for n in range(10_000)}),
        ("index.json", "names 10000 files"),
    ),
    Case("tokenizer-sparse", sparse("tokenizer.json", 1 << 40), ("tokenizer.json", "bytes"), ("router",)),
    Case("tokenizer-deep", text("tokenizer.json", '{"model":' * 100_000), ("tokenizer.json",), ("router",)),
    Case("tokenizer-link", link("tokenizer.json", "/etc/passwd"), ("tokenizer.json", "outside"), ("router",)),
    Case(
        "tokenizer-config",
        text("tokenizer_config.json", '{"chat_template":' + "[" * 100_000),
        ("tokenizer_config.json", "nested"),
        ("router",),
    ),
    Case(
        "template-sparse",
        sparse("chat_template.jinja", 1 << 40),
        ("chat_template.jinja", "bytes"),
        ("router",),
    ),
    Case(
        "template-link", link("chat_template.jinja", "/etc/passwd"), ("chat_template", "outside"), ("router",)
    ),
    Case("template-deep", text("chat_template.jinja", "{{" + "(" * 50_000), ("chat template",), ("router",)),
    *(
        Case(f"eagle3-{number}", damage, ("config.json", said), ("eagle3",), "tiny-eagle3")
        for number, (damage, said) in enumerate(
            [
                (fields("config.json", num_hidden_layers=1_000_000_000), "num_hidden_layers"),
                (fields("config.json", num_hidden_layers=1000), "num_hidden_layers"),
                (fields("config.json", draft_vocab_size=1 << 40), "draft_vocab_size"),
                (fields("config.json", draft_vocab_size="many"), "draft_vocab_size"),
                (fields("config.json", target_hidden_size=[1]), "target_hidden_size"),
                (fields("config.json", eagle_config=7), "eagle_config"),
                (fields("config.json", "eagle_config", eagle_aux_hidden_state_layer_ids=[1e9]), "layer_ids"),
                (
                    fields("config.json", "eagle_config", eagle_aux_hidden_state_layer_ids={"a": 1}),
                    "layer_ids",
                ),
                (fields("config.json", num_aux_hidden_states="x"), "num_aux_hidden_states"),
                (fields("config.json", aux_layer_convention=["x"] * 100_000), "aux_layer_convention"),
                (fields("config.json", fc_norm=[1]), "fc_norm"),
            ]
        )
    ),
    *(
        Case(f"mtp-{number}", damage, ("config.json", said), ("mtp",), "tiny-mtp")
        for number, (damage, said) in enumerate(
            [
                (fields("config.json", num_nextn_predict_layers=1_000_000_000), "num_nextn_predict_layers"),
                (fields("config.json", num_nextn_predict_layers=True), "num_nextn_predict_layers"),
                (fields("config.json", num_hidden_layers="8"), "num_hidden_layers"),
                (fields("config.json", intermediate_size=1 << 18), "intermediate_size"),
                (fields("config.json", mtp_chain=[0]), "mtp_chain"),
            ]
        )
    ),
    Case(
        "target-with-modules",
        fields("config.json", num_nextn_predict_layers=1_000_000_000),
        ("num_nextn_predict_layers",),
        ("node",),
    ),
    *(
        Case(f"llava-{number}", damage, said, ("vision",), "tiny-vision")
        for number, (damage, said) in enumerate(
            [
                *(
                    (fields("config.json", "vision_config", **{key: value}), ("config.json", key))
                    for key, value in [
                        ("hidden_size", 1 << 40),
                        ("hidden_size", 1 << 16),
                        ("num_hidden_layers", 10**9),
                        ("num_attention_heads", 7),
                        ("image_size", 1 << 30),
                        ("patch_size", 4000),
                        ("num_channels", 1 << 30),
                        ("hidden_act", "__import__"),
                        ("layer_norm_eps", "x"),
                        ("model_type", ["clip_vision_model"]),
                    ]
                    if key != "model_type"
                ),
                (fields("config.json", "vision_config", model_type=["x"]), ("config.json", "model_type")),
                (
                    fields("config.json", vision_feature_layer=[-2] * 100_000),
                    ("config.json", "vision_feature_layer"),
                ),
                (
                    fields("config.json", projector_hidden_act=["gelu"]),
                    ("config.json", "projector_hidden_act"),
                ),
                (fields("config.json", image_token_index=HUGE), ("config.json", "image_token_index")),
                (fields("config.json", text_config=[]), ("config.json", "text_config")),
                (
                    fields("preprocessor_config.json", size={"shortest_edge": 1 << 30}),
                    ("preprocessor", "shortest_edge"),
                ),
                (
                    fields("preprocessor_config.json", crop_size=[1]),
                    ("preprocessor_config.json", "crop_size"),
                ),
                (
                    fields("preprocessor_config.json", image_mean="x"),
                    ("preprocessor_config.json", "image_mean"),
                ),
                (fields("preprocessor_config.json", image_processor_type="Evil"), ("preprocessor", "'Evil'")),
                (text("preprocessor_config.json", '{"a":' * 5000), ("preprocessor_config.json", "nested")),
            ]
        )
    ),
]


@pytest.fixture(scope="module")
def loader() -> Iterator[subprocess.Popen[str]]:
    """A process that loads directories in confined children."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.confined_loader"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(loader: subprocess.Popen[str], reader: str, path: Path, target: Path) -> dict[str, Any]:
    assert loader.stdin is not None
    assert loader.stdout is not None
    loader.stdin.write(json.dumps({"reader": reader, "path": str(path), "target": str(target)}) + "\n")
    loader.stdin.flush()
    answer: dict[str, Any] = json.loads(loader.stdout.readline())
    return answer


def copied(model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / model, tmp_path / model))


@pytest.mark.parametrize(
    ("reader", "model"),
    [
        ("router", "tiny-standalone"),
        ("node", "tiny-standalone"),
        ("eagle3", "tiny-eagle3"),
        ("mtp", "tiny-mtp"),
        ("vision", "tiny-vision"),
    ],
)
def test_an_honest_directory_loads_within_the_same_limits(
    reader: str, model: str, loader: subprocess.Popen[str], tmp_path: Path
) -> None:
    answer = ask(loader, reader, copied(model, tmp_path), MODELS / "tiny-target")
    assert answer["outcome"] == "loaded", answer["text"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_false_claim_ends_with_one_error(case: Case, loader: subprocess.Popen[str], tmp_path: Path) -> None:
    path = copied(case.model, tmp_path)
    case.damage(path)
    answers = {reader: ask(loader, reader, path, MODELS / "tiny-target") for reader in case.readers}
    wrong = {name: each for name, each in answers.items() if each["outcome"] not in ("refused", "loaded")}
    assert not wrong, "\n".join(f"{name} {each['outcome']}: {each['text']}" for name, each in wrong.items())
    refusals = [each["text"] for each in answers.values() if each["outcome"] == "refused"]
    assert refusals, "no reader refused it"
    for sentence in refusals:
        assert all(words in sentence for words in case.said), sentence
        assert len(sentence) <= 2000


@pytest.mark.parametrize(
    ("reader", "model"),
    [("router", "tiny-standalone"), ("node", "tiny-standalone"), ("vision", "tiny-vision")],
)
def test_code_beside_a_model_never_runs(
    reader: str, model: str, loader: subprocess.Popen[str], tmp_path: Path
) -> None:
    path, mark = copied(model, tmp_path), tmp_path / "ran"
    names = ("modeling_evil", "configuration_evil", "processing_evil", "tokenization_evil")
    for name in names:
        (path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    (path / "__init__.py").write_text(f"open({str(mark)!r}, 'w')\n")
    autos = (
        "AutoConfig",
        "AutoModel",
        "AutoModelForCausalLM",
        "AutoTokenizer",
        "AutoProcessor",
        "AutoImageProcessor",
    )
    auto_map = {auto: f"{name}.Evil" for auto in autos for name in names[:1]}
    for file in (
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "preprocessor_config.json",
    ):
        fields(file, auto_map=auto_map, custom_pipelines={"x": {"impl": "modeling_evil.Evil"}})(path)
    answer = ask(loader, reader, path, MODELS / "tiny-target")
    assert answer["outcome"] in ("loaded", "refused"), answer["text"]
    assert not mark.exists()


def test_the_layout_of_a_hugging_face_cache_is_read(loader: subprocess.Popen[str], tmp_path: Path) -> None:
    """snapshots/REVISION/NAME -> ../../blobs/HASH, and no other link that leaves a directory."""
    root = tmp_path / "models--org--name"
    (root / "snapshots" / "abc").mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted((MODELS / "tiny-standalone").iterdir())):
        shutil.copy(file, root / "blobs" / str(number))
        (root / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/{number}")
    for reader in ("router", "node"):
        answer = ask(loader, reader, root / "snapshots" / "abc", MODELS / "tiny-target")
        assert answer["outcome"] == "loaded", answer["text"]
    (root / "blobs" / "secret").symlink_to("/etc/passwd")
    link("config.json", "../../blobs/secret")(root / "snapshots" / "abc")
    answer = ask(loader, "router", root / "snapshots" / "abc", MODELS / "tiny-target")
    assert answer["outcome"] == "refused"
    assert "outside the model directory" in answer["text"]
