"""Models and datasets from a stand-in for the hub, from its cache while there is no network, and what fails."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import ModuleType

import hub_server
import jobs
import pytest
from small_model import random_arrays, small_config

from mindrlhf import cli
from mindrlhf.checkpoint.hf import save_hf
from mindrlhf.checkpoint.local import local_model
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.json import write_json_lines
from mindrlhf.hub import download
from mindrlhf.hub.datasets import dataset_files
from mindrlhf.hub.models import read_weight_map
from mindrlhf.metrics.writers import read_metrics
from mindrlhf.models.parameters import parameter_table

MODEL, DATASET = "Org/Tiny-0.1B", "org/sums"
NOWHERE = "http://127.0.0.1:9"  # refuses every connection

# Each argument is [function, arguments...] in JSON; prints the result, or the error.
PROGRAM = """
import json, sys
from mindrlhf.errors import UserError
from mindrlhf.hub.datasets import dataset_files
from mindrlhf.checkpoint.local import local_model
for name, *given in map(json.loads, sys.argv[1:]):
    try:
        found = globals()[name](*given)
        print(json.dumps(found if isinstance(found, str) else [str(file) for file in found]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def rows():
    return [{"question": f"What is {a} + 1?", "answer": f"It is one more. #### {a + 1}"} for a in range(20)]


@pytest.fixture(scope="module")
def hub(rows, tmp_path_factory):
    """A hub with a model, one in another format, and a dataset."""
    folder = tmp_path_factory.mktemp("hub")
    config = small_config(num_layers=1, vocab_size=300, max_position_embeddings=128)
    tokenizer, arrays = train_tokenizer([row["question"] + row["answer"] for row in rows], 300), random_arrays(config)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder / "model", config, tensors, tokenizer=tokenizer)
    write_json_lines(folder / "train.jsonl", rows)
    write_json_lines(folder / "test.jsonl", rows[:4])
    (folder / "other").write_bytes(b"weights in another format")
    files = {file.name: file for file in (folder / "model").iterdir()}
    other = {"pytorch_model.bin": folder / "other", "onnx/model.safetensors": folder / "other"}
    other["preprocessor_config.json"] = folder / "other"
    with hub_server.serving() as hub:
        hub.add("models", MODEL, files | other)
        hub.add("models", "Org/Old", {"config.json": files["config.json"], "pytorch_model.bin": folder / "other"})
        hub.add("datasets", DATASET, {"train.jsonl": folder / "train.jsonl", "test.jsonl": folder / "test.jsonl"})
        yield hub


@pytest.fixture
def call(tmp_path):
    """Call functions in a process with these variables; returns their results."""

    def run(environment: dict[str, str], *calls) -> list:
        argv = [sys.executable, "-c", PROGRAM, *map(json.dumps, calls)]
        variables = {"PYTHONPATH": str(jobs.ROOT), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(argv, cwd=tmp_path, env=variables | environment, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def test_only_what_is_needed_is_downloaded_and_once(hub, call, tmp_path):
    hub.sent.clear()
    light, whole, file = call(
        hub.environment(tmp_path), ["local_model", MODEL, False], ["local_model", MODEL], ["dataset_files", DATASET]
    )
    assert light == whole
    sent = {path for name, path in hub.sent if name == MODEL}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= sent
    assert "preprocessor_config.json" in sent
    assert not {"pytorch_model.bin", "onnx/model.safetensors", "README.md"} & sent
    assert len(hub.sent) == len(set(hub.sent)), "some file was sent twice"
    assert [path for name, path in hub.sent if name == DATASET] == ["train.jsonl"]
    assert file[0].endswith("/train.jsonl")
    hub.sent.clear()
    assert call(hub.environment(tmp_path), ["local_model", MODEL]) == [whole]
    offline = hub.environment(tmp_path) | {"HF_ENDPOINT": NOWHERE}
    for environment in (offline, offline | {"HF_HUB_OFFLINE": "1"}):
        assert call(environment, ["local_model", MODEL], ["dataset_files", DATASET]) == [whole, file]
    assert hub.sent == []


def test_processes_of_one_host_download_once(hub, call, tmp_path):
    hub.sent.clear()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: call(hub.environment(tmp_path), ["local_model", MODEL]), range(3)))
    assert found[0] == found[1] == found[2]
    assert len(hub.sent) == len(set(hub.sent)) > 3


def test_what_is_not_there_costs_a_sentence(hub, call, tmp_path):
    calls = ["local_model", "Org/None"], ["dataset_files", "org/none"], ["dataset_files", DATASET, "dev"]
    model, data, split, old = call(hub.environment(tmp_path), *calls, ["local_model", "Org/Old"])
    assert model.startswith(f"Org/None: there is no such path here, and no model of that name at {hub.address}; check")
    assert data.startswith("org/none: there is no such path here, and no dataset of that name at ")
    assert split == f"{DATASET}: has no split 'dev' in parquet or JSONL files; there are train.jsonl, test.jsonl."
    assert "lacks model.safetensors; fetch it whole with `hf download Org/Old`, or give a model in Hugging Face" in old


def test_without_network_and_cache_the_command_is_named(hub, call, tmp_path):
    environment = hub.environment(tmp_path) | {"HF_ENDPOINT": NOWHERE}
    model, data = call(environment, ["local_model", MODEL], ["dataset_files", DATASET])
    found = "there is no such path here, nor in the hub's cache, and http://127.0.0.1:9 cannot be reached"
    right = "where there is a network, fetch it with `hf download"
    assert model == f"{MODEL}: {found}; {right} {MODEL}`, or give a local path."
    assert data == f"{DATASET}: {found}; {right} --repo-type dataset {DATASET}`, or give a local path."


def test_a_run_from_ids_alone(hub, tmp_path):
    """Training without YAMLs or local files, and a mistake, as processes."""
    variables = hub.environment(tmp_path / "home")
    hub.sent.clear()
    flags = ["--load_sft_checkpoint_infer", MODEL, "--mind_dataset_dir", DATASET, "--save_ckpt_dir", tmp_path / "ckpt"]
    held_out = ("data.template=plain", f"data.val_dataset={DATASET}:test", "trainer.val_before_train=True")
    step = ("data.prompts_per_step=2", "rollout.num_generations=2", "rollout.max_new_tokens=8", "algorithm.beta=0")
    trained = jobs.start(["train", *flags, *step, *held_out, "trainer.total_steps=1"], **variables)
    assert trained.returncode == 0, trained.stderr
    assert {path for name, path in hub.sent if name == DATASET} == {"train.jsonl", "test.jsonl"}
    first, *_ = read_metrics(tmp_path / "metrics.jsonl")
    assert any(name.startswith("val-core/") for name in first)
    card = (tmp_path / "ckpt" / "hf" / "README.md").read_text()
    assert f'base_model: "{MODEL}"' in card
    wrong = jobs.start(["plan", "--load_sft_checkpoint_infer", "Org/None"], **variables)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("mindrlhf plan: Org/None: there is no such path here, and no model of that name")


def test_the_data_command(hub, tmp_path):
    data = ["data", "--dataset", DATASET, "--split", "test", "--tokenizer_path", MODEL, "--template", "plain"]
    made = jobs.start([*data, "--output_path", f"{tmp_path}/"], **hub.environment(tmp_path / "home"))
    assert made.returncode == 0, made.stderr
    assert "test.jsonl" in made.stdout.splitlines()[0]
    assert len(read_prompts(tmp_path / "sums_test.mindrecord")) == 4


def test_a_dataset_is_an_id(tmp_path, capsys):
    argv = ["data", "--dataset", "train.jsonl", "--tokenizer_path", "none", "--output_path", str(tmp_path)]
    assert cli.main(argv) == 2
    assert "--dataset train.jsonl: is no id like openai/gsm8k; name files with --file_path." in capsys.readouterr().err
    assert cli.main([*argv, "--file_path", "train.jsonl"]) == 2
    assert "give either --file_path with their files, or --dataset with a dataset's id." in capsys.readouterr().err


def test_model_scope(monkeypatch, tmp_path):
    """A stand-in for its package."""
    monkeypatch.setenv("MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"^a/scope: MODELSCOPE is set, .* not installed; .*pip install modelscope"):
        local_model("a/scope")
    asked = []

    def snapshot_download(name, **given):
        asked.append((name, given["repo_type"], given["allow_patterns"]))
        return str(tmp_path)

    package = ModuleType("modelscope")
    package.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "modelscope", package)
    (tmp_path / "config.json").write_text("{}")
    assert local_model("a/scope", weights=False) == str(tmp_path)
    with pytest.raises(UserError, match="fetch it whole with `modelscope download --model a/scope`"):
        local_model("a/scope")
    (tmp_path / "train.jsonl").write_text("{}")
    assert dataset_files("a/rows") == [tmp_path / "train.jsonl"]
    assert [(name, kind) for name, kind, _ in asked] == [("a/scope", "model")] * 2 + [("a/rows", "dataset")]
    assert "model.safetensors" not in asked[0][2]
    assert "model.safetensors" in asked[1][2]


@contextmanager
def answering(answer):
    """A server whose replies `answer(path)` makes: a status, headers and a body; it keeps silent for None."""
    done = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            reply = answer(self.path)
            if reply is None:
                done.wait(60)
                return
            status, headers, body = reply
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        done.set()
        server.shutdown()
        server.server_close()


def test_a_silent_hub_is_named_and_left(monkeypatch, tmp_path, capfd):
    """After a while a line says so; then the cache serves, or a sentence; others are not held up."""
    monkeypatch.setattr(download, "PATIENCE_S", 0.2)
    monkeypatch.setattr(download, "SILENCE_S", 1.0)
    with answering(lambda path: None) as address:
        for key, value in {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(UserError, match=f"org/silent: there is no such path .*{address} cannot be reached; where"):
            download.download("org/silent", "model", ["*"])
    assert "org/silent: the hub has not answered for 0.2 s; it is waited for up to 1 s" in capfd.readouterr().err


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit", "sha"])
def test_a_server_that_names_files_outside_of_the_cache(monkeypatch, tmp_path, header):
    """Nothing is written there, whichever of its names goes astray."""
    astray = "../" * 12 + str(tmp_path / "astray").lstrip("/")
    sha = astray if header == "sha" else hub_server.COMMIT

    def answer(path):
        if path.startswith("/api/"):
            info = {"id": "org/evil", "sha": sha, "siblings": [{"rfilename": "config.json"}], "tags": []}
            return 200, {}, json.dumps(info).encode()
        headers = {"ETag": '"' + "0" * 40 + '"', "X-Repo-Commit": hub_server.COMMIT}
        return 200, headers | ({header: f'"{astray}"' if "ag" in header else astray} if header != "sha" else {}), b"{}"

    home = tmp_path / "home"
    with answering(answer) as address:
        own = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        for key, value in own.items():
            monkeypatch.setenv(key, value)
        with pytest.raises(UserError, match=r"^org/evil: .*(the server asks to write|Invalid pointer path)"):
            download.download("org/evil", "model", ["*"])
    written = [path for path in tmp_path.rglob("*") if not path.is_relative_to(home)]
    assert written == []


@pytest.mark.parametrize("weight_map", ["null", "[1]", '{"a": 1}', '{"a": {"b": "c"}}', "{}", '"x"', '{"a": null}'])
def test_an_index_that_is_none(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: has no weight_map from tensor to file"):
        read_weight_map(tmp_path / "model.safetensors.index.json")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')
    with pytest.raises(UserError, match=r"names '\.\./b', which is not a file inside of its folder"):
        read_weight_map(tmp_path / "model.safetensors.index.json")
